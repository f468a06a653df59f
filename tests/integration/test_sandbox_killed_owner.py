"""A pool whose process was killed: its processes die with it, and the next backend of its kind takes away all the rest."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from docker_engine import make_root, missing, running_engine
from sandbox_backends import alive, docker_backend, needs_bwrap, process_backend

from rlagent.sandboxes.cgroups import Cgroups
from rlagent.sandboxes.docker_connection import LABEL, Connection

SLEEPS = f"9000.{os.getpid()}"  # the argument by which the commands of this test are found
OWNER = f"""
import asyncio, sys
from pathlib import Path
from rlagent.errors import SandboxError
from rlagent.sandboxes.docker import DockerBackend
from rlagent.sandboxes.pool import SandboxPool
from rlagent.sandboxes.process_backend import ProcessBackend

kind, state, engine, root = sys.argv[1], *map(Path, sys.argv[2:])

async def prepare(sandbox):
    await sandbox.write("x", b"x")

async def episode(pool, up):
    async with pool.sandbox("task", prepare) as sandbox:
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "touch up; setsid sleep {SLEEPS} & sleep {SLEEPS}"]))
        while True:
            try:
                await sandbox.read("up")
                break
            except SandboxError:
                await asyncio.sleep(0.05)
        up.release()
        await running

async def main():
    if kind == "docker":
        backend = DockerBackend(engine=engine, state_directory=state)
    else:
        backend = ProcessBackend(control_groups=kind == "groups", state_directory=state)
    async with backend, SandboxPool(backend, max_open=4) as pool:
        if kind == "docker":
            backend.image = (await backend.import_directory(root)).name
        up = asyncio.Semaphore(0)
        runs = [asyncio.create_task(episode(pool, up)) for _ in range(2)]
        await up.acquire()
        await up.acquire()
        print("ready", backend._first_user if kind == "users" else 0, flush=True)
        await asyncio.gather(*runs)

asyncio.run(main())
"""


_ELSEWHERE = ["sh", "-c", 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"', "sh"]


@asynccontextmanager
async def killed_owner(kind: str, state: Path, *more: Path, groups: Sequence[Path] = ()) -> AsyncIterator[int]:
    """After its kill -9, which finds it in these groups. The first of the users that its sandboxes had, if they had some."""
    line = [sys.executable, "-c", OWNER, kind, str(state), *map(str, more or (state, state))]
    owner = await asyncio.create_subprocess_exec(
        *_ELSEWHERE, *map(str, groups), "--", *line, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert owner.stdout is not None
    try:
        word, user = (await owner.stdout.readline()).split()
        assert word == b"ready"
        await until(lambda: len(alive(SLEEPS)) >= 4)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        await owner.wait()
    yield int(user)


async def until(is_so: Callable[[], bool]) -> None:
    """What other processes do, and the kernel with them after their death, takes its time on a busy machine."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A sandbox's user must reach its files; pytest's own directories are closed to other users."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        yield Path(directory)


def users_alive() -> set[int]:
    """Whose processes there are; those that are dead and not waited for left out."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue
        if any(line.startswith("State:\tZ") for line in lines):
            continue
        found |= {int(line.split()[1]) for line in lines if line.startswith("Uid:")}
    return found


@needs_bwrap
@pytest.mark.parametrize("kind", ["groups", "users"])
async def test_a_killed_process_pool_leaves_nothing_once_the_next_has_started(kind: str, open_directory: Path) -> None:
    state = open_directory / "state"
    found = Cgroups.find()  # in version 2, whoever makes groups must not be in one below
    others = [own / f"test-{os.getpid()}" for own in set(found.own.values())] if found.version == 1 else []
    for other in others:
        other.mkdir()
    async with killed_owner(kind, state, groups=others) as user:
        (left,) = [path.stem for path in state.glob("*.lock")]
        assert (state / left).exists()
        async with process_backend(kind, state):
            assert not (state / left).exists()
            await until(lambda: alive(SLEEPS) == [])
            await until(lambda: not user or not users_alive() & set(range(user, user + 65536)))
            for home in found.homes(left):
                assert not home.exists()
            for other in others:
                assert not (other / f"rlagent-{left}").exists()
                other.rmdir()
        assert list(state.iterdir()) == []
        assert str(state) not in Path("/proc/self/mounts").read_text()


@pytest.mark.slow
async def test_a_killed_docker_pool_leaves_nothing_once_the_next_has_started(tmp_path: Path) -> None:
    reason = missing("dockerd", "runc", "busybox")
    if reason is not None:
        pytest.skip(reason)
    state, root = tmp_path / "state", make_root(tmp_path / "root")
    with running_engine() as engine:
        async with killed_owner("docker", state, engine, root):
            seen = await Connection.open(engine)
            try:
                of_owners = {"label": LABEL}
                assert len(seen.client.containers.list(all=True, filters=of_owners)) == 2
                assert len(seen.client.images.list(filters=of_owners)) == 2  # imported, and prepared
                async with docker_backend("runc", state, engine):
                    assert seen.client.containers.list(all=True, filters=of_owners) == []
                    assert seen.client.images.list(all=True, filters=of_owners) == []
                    assert alive(SLEEPS) == []
            finally:
                seen.close()
        assert list(state.iterdir()) == []
