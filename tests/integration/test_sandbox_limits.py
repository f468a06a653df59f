"""How a command comes under its limits: before anything of it runs, whichever means the machine has, and for each sandbox anew."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_backends import TIGHT, needs_bwrap

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Limits
from rlagent.sandboxes.cgroup_reuse import Groups
from rlagent.sandboxes.cgroups import Cgroups, sweep
from rlagent.sandboxes.process_backend import ProcessBackend

WORKER = os.getpid()  # another process may run the same tests beside this one
needs_groups = pytest.mark.skipif(not Cgroups.find().own, reason="control groups cannot be written here")


@pytest.fixture(params=[True, False], ids=["groups", "users"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[ProcessBackend]:
    async with ProcessBackend(limits=TIGHT, control_groups=request.param) as opened:
        yield opened


@needs_bwrap
async def test_a_command_has_its_limits_from_its_first_instruction(backend: ProcessBackend) -> None:
    async with await backend.open() as sandbox:
        done = await sandbox.exec(["sh", "-c", "ulimit -c; ulimit -t; ulimit -n; ulimit -Ht; ulimit -Hn"])
    assert TIGHT.cpu_s is not None
    assert done.stdout.split() == [b"0", b"10", b"64", b"10", b"64"]


@needs_bwrap
@needs_groups
async def test_a_command_is_in_every_group_and_this_process_in_none() -> None:
    before = Path("/proc/self/cgroup").read_text()
    async with ProcessBackend(limits=TIGHT) as backend, await backend.open() as sandbox:
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "touch up; sleep 1000"]))
        async with asyncio.timeout(60):
            while not running.done():
                with suppress(SandboxError):
                    await sandbox.read("up")
                    break
                await asyncio.sleep(0.01)
        group = sandbox._opened.group
        assert group is not None
        # Named in the limits: each of these controllers has a group, where this machine has the controller.
        assert set(group.directories) == set(Cgroups.find().own)
        for directory in group.directories.values():
            members = [int(pid) for pid in (directory / "cgroup.procs").read_text().split()]
            commands = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in members]
            assert "bwrap" in commands  # the namespace's first process
            assert len(members) >= 2
        for task in Path("/proc/self/task").iterdir():
            assert (task / "cgroup").read_text() == before
        await sandbox.close()
        assert (await running).signal == 9
    assert Path("/proc/self/cgroup").read_text() == before


@needs_groups
def test_a_group_serves_again_only_when_it_is_empty() -> None:
    cgroups = Cgroups.find()
    groups = Groups(cgroups, f"test-reuse-{WORKER}", replace(TIGHT, cpus=None))
    try:
        one, other = groups.take(), groups.take()
        assert one is not None
        assert other is not None
        assert one.directories != other.directories
        groups.give_back(one)
        assert groups.take() == one
        with one.entered():  # a thread is in it
            assert not one.is_clean()
        assert one.is_clean()
        groups.give_back(one)
    finally:
        sweep(cgroups.homes(f"test-reuse-{WORKER}"))
    assert not any(path.exists() for path in one.directories.values())


@needs_groups
def test_only_the_groups_are_made_that_hold_something() -> None:
    cgroups = Cgroups.find()
    groups = Groups(cgroups, f"test-need-{WORKER}", Limits(cpus=None))
    try:
        taken = groups.take()
        assert taken is not None
        assert "cpu" not in taken.directories or taken.version == 2
        assert "memory" in taken.directories
    finally:
        sweep(cgroups.homes(f"test-need-{WORKER}"))
