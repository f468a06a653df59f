"""The process sandbox with real commands, isolated by bubblewrap where it is installed and bare elsewhere."""

import asyncio
import dataclasses
import os
import shutil
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_backends import alive, needs_bwrap

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Limits
from rlagent.sandboxes.process import ProcessSandbox
from rlagent.sandboxes.process_backend import ProcessBackend

WORKER = os.getpid()  # marks the commands of this test process: another one runs the same tests beside it

LIMITS = Limits(wall_s=30, cpu_s=2, memory_bytes=512 * 1024**2, file_size_bytes=1024**2)


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine without bubblewrap: it is not on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.fixture(params=[pytest.param("isolated", marks=needs_bwrap), "bare"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[ProcessSandbox]:
    if request.param == "bare":
        request.getfixturevalue("no_bwrap")
    async with ProcessSandbox(limits=LIMITS, allow_unisolated=True) as opened:
        assert opened.isolated is (request.param == "isolated")
        yield opened


async def wait_for_file(sandbox: ProcessSandbox, path: str) -> None:
    async with asyncio.timeout(20):
        while True:
            with suppress(SandboxError):
                await sandbox.read(path)
                return
            await asyncio.sleep(0.01)


async def test_output_exit_code_and_input(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "cat; echo err >&2; echo $X; exit 3"], stdin=b"in ", env={"X": "y"})
    assert (done.exit_code, done.signal, done.stdout, done.stderr) == (3, None, b"in y\n", b"err\n")
    assert (done.timed_out, done.truncated, done.out_of_memory, done.ok) == (False, False, False, False)


async def test_a_signal_is_told_from_an_exit_code(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "kill -TERM $$"])
    assert (done.exit_code, done.signal) == (None, 15)


async def test_a_timeout_ends_the_command_and_what_it_started(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(
        ["sh", "-c", f"echo started; sleep 1000.{WORKER} & setsid sleep 1000.{WORKER}"], timeout_s=0.5
    )
    assert done.timed_out
    assert (done.exit_code, done.signal, done.stdout) == (None, 9, b"started\n")
    assert done.wall_s < 5
    assert alive(f"1000.{WORKER}") == []


async def test_the_limits_end_a_command_that_was_given_more_time() -> None:
    async with ProcessSandbox(limits=Limits(wall_s=0.3), allow_unisolated=True) as sandbox:
        assert (await sandbox.exec(["sleep", "1000"], timeout_s=900)).timed_out
        assert (await sandbox.exec(["sleep", "1000"])).timed_out


@pytest.mark.parametrize("start", ["./left &", "setsid ./left &", "(setsid ./left >/dev/null 2>&1 &)"])
async def test_what_a_command_leaves_behind_is_gone_when_it_is_answered(sandbox: ProcessSandbox, start: str) -> None:
    await sandbox.write("left", f"#!/bin/sh\necho > up\nexec sleep 2000.{WORKER}\n".encode())
    done = await sandbox.exec(["sh", "-c", f"chmod +x left; {start}\nwhile ! [ -s up ]; do :; done; exit 7"])
    assert done.exit_code == 7
    assert alive(f"2000.{WORKER}") == []


async def test_a_cancelled_command_is_gone(sandbox: ProcessSandbox) -> None:
    running = asyncio.create_task(
        sandbox.exec(["sh", "-c", f"touch up; sleep 3000.{WORKER} & setsid sleep 3000.{WORKER}"])
    )
    await wait_for_file(sandbox, "up")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert alive(f"3000.{WORKER}") == []


async def test_close_ends_what_runs_and_leaves_no_file(sandbox: ProcessSandbox) -> None:
    running = asyncio.create_task(sandbox.exec(["sh", "-c", f"mkdir -m 0 shut; touch up; sleep 4000.{WORKER}"]))
    await wait_for_file(sandbox, "up")
    await sandbox.close()
    assert (await running).signal == 9
    assert alive(f"4000.{WORKER}") == []
    with pytest.raises(SandboxError, match="not open"):
        await sandbox.exec(["true"])


@needs_bwrap
async def test_a_sandbox_of_a_backend_has_one_directory_and_leaves_none(tmp_path: Path) -> None:
    on_disk = dataclasses.replace(LIMITS, disk_bytes=None)  # bounded ones are mounted, where no other sees them
    async with ProcessBackend(limits=on_disk, state_directory=tmp_path) as backend:
        async with await backend.open() as opened:
            assert (await opened.exec(["true"])).ok
            assert len(list(tmp_path.glob("*/s*"))) == 1
        assert list(tmp_path.glob("*/s*")) == []


async def test_an_output_flood_is_cut_and_held_by_nobody(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "head -c 50000000 /dev/zero"], output_limit_bytes=1000)
    assert done.ok
    assert done.truncated
    assert len(done.stdout) == 1000


async def test_memory_cpu_and_file_size_are_bounded(sandbox: ProcessSandbox) -> None:
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    if python.startswith("/usr") or not sandbox.isolated:
        memory = await sandbox.exec([python, "-c", "x = bytearray(2**30)"])
        assert memory.out_of_memory
        assert memory.exit_code == 1 or memory.signal == 9  # refused by the rlimit, or ended by the kernel
    disk = await sandbox.exec(["sh", "-c", "head -c 3000000 /dev/zero > big"])
    assert not disk.ok
    assert len(await sandbox.read("big")) <= 1024**2
    spin = await sandbox.exec(["sh", "-c", "while true; do :; done"], timeout_s=30)
    assert spin.signal in (9, 24)  # SIGXCPU, or SIGKILL at the hard limit
    assert not spin.timed_out


async def test_files_go_in_and_out(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    await sandbox.write("a/b.txt", b"1")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.txt").write_bytes(b"2")
    (tmp_path / "link").symlink_to("/etc/passwd")
    await sandbox.upload(tmp_path)
    done = await sandbox.exec(["sh", "-c", "cat b.txt ../c/d.txt; ls ..; echo 3 > out"], cwd="a")
    assert done.stdout.split() == [b"12a", b"c"]
    assert await sandbox.read("a/out") == b"3\n"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "link/x", "/workaround"])
async def test_paths_do_not_leave_the_root(sandbox: ProcessSandbox, path: str) -> None:
    await sandbox.exec(["ln", "-s", "/", "link"])
    with pytest.raises(SandboxError, match="outside"):
        await sandbox.write(path, b"x")
    with pytest.raises(SandboxError, match="outside"):
        await sandbox.read(path)


async def test_what_cannot_be_started_or_found_is_said(sandbox: ProcessSandbox) -> None:
    with pytest.raises(SandboxError, match="empty"):
        await sandbox.exec([])
    with pytest.raises(SandboxError, match=r"argv is the text 'ls -l'; give a list"):
        await sandbox.exec("ls -l")
    with pytest.raises(SandboxError, match=r"content of 'a' is str, not bytes"):
        await sandbox.write("a", "text")  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match="cwd"):
        await sandbox.exec(["true"], cwd="nowhere")
    with pytest.raises(SandboxError, match="cannot be read"):
        await sandbox.read("nothing")
    with pytest.raises(SandboxError, match=r"'no-such-command' cannot be started.*No such file"):
        await sandbox.exec(["no-such-command"])
    with pytest.raises(SandboxError, match="cannot be started"):
        await sandbox.exec(["true"], env={"A": "nul\0byte"})


def _accept_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.close()


@needs_bwrap
async def test_the_network_is_away_unless_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=_accept_once, args=(server,), daemon=True).start()
        command = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached"]
        async with ProcessSandbox() as closed:
            assert b"reached" not in (await closed.exec(command)).stdout
        async with ProcessSandbox(network=True) as opened:
            assert b"reached" in (await opened.exec(command)).stdout


@needs_bwrap
async def test_the_host_is_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")
    async with ProcessSandbox() as sandbox:
        for place in ("/usr/x", "/x", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname"):
            assert not (await sandbox.exec(["sh", "-c", f"echo x > {place}"])).ok, place
        assert (await sandbox.exec(["find", "/proc/sys", "-writable"])).stdout == b""
        assert b"host" not in (await sandbox.exec(["cat", str(tmp_path / "secret")])).stdout
        assert not (await sandbox.exec(["ls", "/root"])).ok
        assert (await sandbox.exec(["sh", "-c", "kill -9 -1; echo unharmed"])).ok
        processes = await sandbox.exec(["sh", "-c", "ls /proc | grep -c '^[0-9]'"])
        assert int(processes.stdout) < 6


@needs_bwrap
async def test_shared_directories_outlive_a_command_and_are_the_sandbox_own() -> None:
    async with ProcessSandbox() as one, ProcessSandbox() as other:
        assert (await one.exec(["sh", "-c", "echo a > /tmp/a; echo b > /dev/shm/b"])).ok
        assert (await one.exec(["cat", "/tmp/a", "/dev/shm/b"])).stdout == b"a\nb\n"
        assert not (await other.exec(["cat", "/tmp/a"])).ok
        await one.write("/work/c", b"c")  # a path as a command sees it
        assert (await one.exec(["cat", "/work/c"])).stdout == b"c"


async def test_without_bubblewrap_it_refuses_unless_told(no_bwrap: None) -> None:
    with pytest.raises(SandboxError, match=r"not installed.*allow_unisolated=True"):
        await ProcessSandbox().__aenter__()


async def test_bubblewrap_that_may_not_make_namespaces_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="No permissions to create new namespace"):
        await ProcessSandbox().__aenter__()
    async with ProcessSandbox(allow_unisolated=True) as bare:
        assert not bare.isolated
        assert (await bare.exec(["echo", "x"])).stdout == b"x\n"


async def test_what_is_enforced_is_told(sandbox: ProcessSandbox) -> None:
    told = sandbox.enforced
    assert set(told) == {field.name for field in dataclasses.fields(Limits)}
    assert told["wall_s"] == "timeout"
    assert sandbox.isolated or told["disk_bytes"] is None


async def test_a_closed_sandbox_says_so() -> None:
    with pytest.raises(SandboxError, match="not open"):
        await ProcessSandbox(allow_unisolated=True).exec(["true"])
