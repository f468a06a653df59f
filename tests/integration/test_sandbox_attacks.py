"""What untrusted code tries, on each backend: none of it succeeds, and each attempt has a clear result."""

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from docker_engine import make_root, missing, running_engine
from sandbox_backends import MIB, TIGHT, alive, docker_backend, needs_bwrap, process_backend

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Backend, Sandbox
from rlagent.sandboxes.docker_sandbox import DockerSandbox

WORKER = os.getpid()  # marks the commands of this test process: another one runs the same tests beside it


@pytest.fixture(scope="module")
def engine() -> Iterator[Path]:
    reason = missing("dockerd", "runc", "busybox")
    if reason is not None:
        pytest.skip(reason)
    with running_engine() as opened:
        yield opened


@pytest.fixture(params=[
    pytest.param("groups", marks=needs_bwrap), pytest.param("users", marks=needs_bwrap),
    pytest.param("runc", marks=pytest.mark.slow), pytest.param("runsc", marks=pytest.mark.slow),
])  # fmt: skip
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own directories are closed to other users
        Path(directory).chmod(0o711)
        if request.param in ("groups", "users"):
            async with process_backend(request.param, Path(directory, "state")) as opened:
                yield opened
            return
        if request.param == "runsc" and (reason := missing("runsc")) is not None:
            pytest.skip(reason)
        engine = request.getfixturevalue("engine")
        async with docker_backend(request.param, Path(directory, "state"), engine) as box:
            box.image = (await box.import_directory(make_root(Path(directory, "root")))).name
            yield box


@pytest.fixture
async def sandbox(backend: Backend) -> AsyncIterator[Sandbox]:
    async with await backend.open() as opened:
        yield opened


def is_gvisor(sandbox: Sandbox) -> bool:
    return isinstance(sandbox, DockerSandbox) and sandbox.gvisor


async def test_a_fork_bomb_stops_at_the_limit(sandbox: Sandbox) -> None:
    assert sandbox.enforced["pids"] is not None
    counted = f"i=0; while [ $i -lt 100 ]; do sleep 5000.{WORKER} & i=$((i+1)); echo $i; done; wait"
    done = await sandbox.exec(["sh", "-c", counted], timeout_s=10)
    assert not done.ok
    if is_gvisor(sandbox):  # threads of its kernel count too; at the limit it ends as a whole
        assert done.signal == 9 or b"fork" in done.stderr.lower()
    else:
        assert b"fork" in done.stderr.lower()
        assert 1 < int(done.stdout.split()[-1]) <= TIGHT.pids
    assert alive(f"5000.{WORKER}") == []
    bomb = await sandbox.exec(["sh", "-c", "b() { b | b & b; }; b"], timeout_s=1.5)
    assert not bomb.ok
    assert (await sandbox.exec(["echo", "as before"])).stdout == b"as before\n"


async def test_a_memory_flood_ends_the_command(sandbox: Sandbox) -> None:
    if sandbox.enforced["memory_bytes"] is None:
        pytest.skip("memory is not bounded here")
    done = await sandbox.exec(["sh", "-c", "head -c 400000000 /dev/zero | tail -c 400000000 > /dev/null"], timeout_s=15)
    assert not done.ok
    assert done.out_of_memory or b"memory" in done.stderr
    assert not done.timed_out
    assert (await sandbox.exec(["true"])).ok


@pytest.mark.parametrize("place", ["big", "/tmp/big", "/dev/shm/big"])
async def test_a_disk_flood_ends_at_the_limit(sandbox: Sandbox, place: str) -> None:
    if sandbox.enforced["disk_bytes"] is None:
        pytest.skip("the disk is not bounded here")
    done = await sandbox.exec(["sh", "-c", f"head -c {3 * TIGHT.disk_bytes} /dev/zero > {place}"])
    assert not done.ok
    written = int((await sandbox.exec(["sh", "-c", f"wc -c < {place}; rm {place}"])).stdout)
    assert written <= TIGHT.disk_bytes
    assert (await sandbox.exec(["sh", "-c", "echo x > small"])).ok


async def test_a_flood_of_empty_files_ends_at_the_limit(sandbox: Sandbox) -> None:
    if sandbox.enforced["disk_bytes"] is None:
        pytest.skip("the disk is not bounded here")
    done = await sandbox.exec(["sh", "-c", "i=0; while : > f$i; do i=$((i+1)); done; echo $i"], timeout_s=15)
    assert b"No space left" in done.stderr
    assert not done.timed_out


async def test_an_output_flood_is_cut(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "cat /dev/zero & cat /dev/zero >&2"], timeout_s=1, output_limit_bytes=1000)
    assert (done.timed_out, done.truncated, len(done.stdout), len(done.stderr)) == (True, True, 1000, 1000)


async def test_sleeping_past_the_timeout_helps_nobody(sandbox: Sandbox) -> None:
    deaf = f"trap '' TERM INT HUP QUIT; (setsid sleep 6000.{WORKER} &); sleep 6000.{WORKER}; sleep 6000.{WORKER}"
    done = await sandbox.exec(["sh", "-c", deaf], timeout_s=1)
    assert (done.timed_out, done.exit_code, done.signal) == (True, None, 9)
    assert alive(f"6000.{WORKER}") == []


async def test_leftover_processes_are_gone(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["sh", "-c", f"(setsid sleep 7000.{WORKER} >/dev/null 2>&1 &) ; sleep 0.2; exit 4"])
    assert done.exit_code == 4
    assert alive(f"7000.{WORKER}") == []


async def test_signals_do_not_reach_the_host(sandbox: Sandbox) -> None:
    victim = await asyncio.create_subprocess_exec("sleep", f"8000.{WORKER}")
    try:
        done = await sandbox.exec(["sh", "-c", f"kill -9 {victim.pid}; kill -9 {os.getpid()}; kill -9 -1; echo after"])
        assert done.ok or done.signal == 9
        assert alive(f"8000.{WORKER}") == [victim.pid]
        seen = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])
        assert f"8000.{WORKER}".encode() not in seen.stdout
    finally:
        victim.kill()
        await victim.wait()


@pytest.mark.parametrize("place", [
    "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
    "/sys/kernel/uevent_helper", "/sys/fs/cgroup/pids/x", "/sys/fs/cgroup/x", "/proc/1/root/etc/rlagent-test",
])  # fmt: skip
async def test_proc_and_sys_take_no_writes(sandbox: Sandbox, place: str) -> None:
    host = Path(place)
    before = (
        host.read_bytes()
        if place.startswith(("/proc/sys/", "/sys/")) and host.is_file() and os.access(host, os.R_OK)
        else None
    )
    await sandbox.exec(["sh", "-c", f"mkdir -p {host.parent}; echo h > {place}"])
    if before is None:
        assert place in ("/proc/sysrq-trigger", "/proc/1/root/etc/rlagent-test") or not host.exists()
    else:
        assert host.read_bytes() == before
    assert not Path("/etc/rlagent-test").exists()


async def test_the_host_memory_disks_and_keys_are_not_there(sandbox: Sandbox) -> None:
    for place in (
        "/proc/kcore",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/vda",
        "/dev/sda",
        "/etc/shadow-",
        "/root/.ssh",
        "/var/run/docker.sock",
    ):
        done = await sandbox.exec(["sh", "-c", f"head -c 1 {place}"])
        assert done.stdout == b"", place
    assert not (await sandbox.exec(["sh", "-c", "mount -t tmpfs none /tmp"])).ok
    assert not (await sandbox.exec(["mknod", "disk", "b", "254", "0"])).ok


async def test_links_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    links = f"ln -s {secret} out; ln -s {tmp_path} dir; ln -s ../../../../../../..{secret} up; ln {secret} hard; ln /etc/shadow hard"
    await sandbox.exec(["sh", "-c", links])
    for name in ("out", "up", "dir/secret", "hard"):
        assert b"host" not in (await sandbox.exec(["cat", name])).stdout
        with pytest.raises(SandboxError):
            await sandbox.read(name)
    for name in ("out", "up", "dir/secret", "dir/new"):
        try:
            await sandbox.write(name, b"overwritten")
        except SandboxError:
            continue
    assert secret.read_text() == "host"
    assert [found.name for found in tmp_path.iterdir()] == ["secret"]


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.settimeout(0)
        name = f"\0rlagent-test-{os.getpid()}"
        abstract.bind(name)
        port = server.getsockname()[1]
        for tool in (f"nc -w 2 127.0.0.1 {port} < /dev/null", f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}'"):
            assert not (await sandbox.exec(["sh", "-c", tool])).ok
        with pytest.raises(BlockingIOError):
            server.accept()
    cards = await sandbox.exec(["sh", "-c", "grep -c : /proc/net/dev; grep : /proc/net/dev"])
    assert b"eth" not in cards.stdout


async def test_snapshots_and_forks_are_independent(backend: Backend) -> None:
    async with await backend.open() as base:
        made = await base.exec(
            ["sh", "-c", "mkdir d; echo 1 > d/a; echo 2 > b; ln -s b c; echo t > /tmp/t; chmod 750 d"]
        )
        assert made.ok
        kept = await base.snapshot()
        await base.write("b", b"later")
        async with await backend.open(kept) as one, await backend.open(kept) as other:
            changed = await one.exec(["sh", "-c", "rm -r d; mkdir d; echo new > d/n; echo 3 >> b; cat c /tmp/t"])
            # gVisor keeps an empty /tmp in its memory, of which no snapshot knows.
            assert changed.stdout == (b"2\n3\n" if is_gvisor(one) else b"2\n3\nt\n")
            assert (await other.exec(["sh", "-c", "cat d/a b; ls d"])).stdout == b"1\n2\na\n"
            async with await one.fork() as third:  # a layer on a layer; a directory that was replaced
                assert (await third.exec(["sh", "-c", "ls d; cat b"])).stdout == b"n\n2\n3\n"
                assert (await third.exec(["sh", "-c", "echo own > d/n; rm b"])).ok
            assert await one.read("d/n") == b"new\n"
        assert await base.read("b") == b"later"
        await backend.delete(kept)
        with pytest.raises(SandboxError, match="deleted"):
            await backend.open(kept)


def test_the_limits_are_tight_enough_for_a_shared_machine() -> None:
    assert TIGHT.pids is not None
    assert TIGHT.pids <= 64
    assert TIGHT.memory_bytes is not None
    assert TIGHT.memory_bytes <= 256 * MIB
