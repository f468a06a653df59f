"""The pool with real process sandboxes: bounds, warm ones, forks of what was prepared once."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_backends import TIGHT, needs_bwrap, process_backend

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Backend, Limits, Sandbox
from rlagent.sandboxes.cgroups import Cgroups
from rlagent.sandboxes.pool import SandboxPool

pytestmark = needs_bwrap


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    async with process_backend("groups", tmp_path / "state") as opened:
        yield opened


async def test_no_more_are_open_than_allowed_and_all_are_served(backend: Backend) -> None:
    alive_now, most = 0, 0

    async def episode(pool: SandboxPool, number: int) -> bytes:
        nonlocal alive_now, most
        async with pool.sandbox() as sandbox:
            alive_now += 1
            most = max(most, alive_now)
            done = await sandbox.exec(["sh", "-c", f"ls | wc -l; echo {number} > mine; cat mine"])
            alive_now -= 1
            return done.stdout

    async with SandboxPool(backend, max_open=3, num_warm=1) as pool:
        answers = await asyncio.gather(*(episode(pool, number) for number in range(12)))
    assert answers == [f"0\n{number}\n".encode() for number in range(12)]
    assert most <= 3


async def test_a_prepared_filesystem_is_made_once_and_forked(backend: Backend) -> None:
    prepared = 0

    async def prepare(sandbox: Sandbox) -> None:
        nonlocal prepared
        prepared += 1
        await sandbox.write("data", b"base\n")

    async def episode(pool: SandboxPool, number: int) -> bytes:
        async with pool.sandbox(("task", 1), prepare) as sandbox:
            return (await sandbox.exec(["sh", "-c", f"echo {number} >> data; cat data"])).stdout

    async with SandboxPool(backend, max_open=3) as pool:
        answers = await asyncio.gather(*(episode(pool, number) for number in range(6)))
    assert answers == [f"base\n{number}\n".encode() for number in range(6)]
    assert prepared == 1


async def test_a_failed_preparation_is_told_and_tried_again(backend: Backend) -> None:
    async def broken(sandbox: Sandbox) -> None:
        raise SandboxError("cannot be prepared")

    async def works(sandbox: Sandbox) -> None:
        await sandbox.write("a", b"1")

    async with SandboxPool(backend, max_open=1) as pool:
        with pytest.raises(SandboxError, match="cannot be prepared"):
            async with pool.sandbox("k", broken):
                pass
        async with pool.sandbox("k", works) as sandbox:
            assert await sandbox.read("a") == b"1"
    with pytest.raises(SandboxError, match="closed"):
        async with pool.sandbox():
            pass
    with pytest.raises(SandboxError, match="num_warm"):
        SandboxPool(backend, max_open=1, num_warm=1)


def test_control_groups_of_version_2_are_written_as_the_kernel_wants_them() -> None:
    """On a tree of plain files: what is written where."""
    with tempfile.TemporaryDirectory() as directory:
        own = Path(directory, "ours")
        own.mkdir()
        found = Cgroups.find(f"cgroup2 {directory} cgroup2 rw 0 0\n", "0::/ours\n")
        assert (found.version, set(found.own)) == (2, {"memory", "pids", "cpu"})
        group = found.make("owner", "s1", Limits(memory_bytes=1000, pids=5, cpus=0.5))
        assert group.doors == [own / "rlagent-owner" / "s1" / "cgroup.procs"]
        for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
            (own / "rlagent-owner" / "s1" / name).touch()
        group.limit(Limits(memory_bytes=1000, pids=5, cpus=0.5))
        written = {path.name: path.read_text() for path in (own / "rlagent-owner" / "s1").iterdir()}
        assert written == {"memory.max": "1000", "memory.swap.max": "0", "pids.max": "8", "cpu.max": "50000 100000"}
        (own / "rlagent-owner" / "s1" / "memory.events").write_text("max 3\noom_kill 2\n")
        assert group.oom_kills() == 2
    assert TIGHT.cpus is not None
