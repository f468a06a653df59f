"""The process sandbox with real commands, isolated by bubblewrap where it is installed and bare elsewhere."""

import shutil
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Limits
from rlagent.sandboxes.process import ProcessSandbox

HAS_BWRAP = shutil.which("bwrap") is not None
needs_bwrap = pytest.mark.skipif(not HAS_BWRAP, reason="bubblewrap is not installed")


@pytest.fixture(params=["isolated", "bare"])
async def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessSandbox]:
    if request.param == "isolated" and not HAS_BWRAP:
        pytest.skip("bubblewrap is not installed")
    made = ProcessSandbox(
        limits=Limits(cpu_s=5, memory_bytes=512 * 1024**2, file_size_bytes=1024**2), allow_unisolated=True
    )
    if request.param == "bare":
        made._bwrap = None
    async with made as opened:
        yield opened


async def test_output_exit_code_and_input(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "cat; echo err >&2; echo $X; exit 3"], stdin=b"in ", env={"X": "y"})
    assert (done.exit_code, done.signal, done.stdout, done.stderr) == (3, None, b"in y\n", b"err\n")
    assert (done.timed_out, done.truncated, done.out_of_memory, done.ok) == (False, False, False, False)


async def test_a_signal_is_told_from_an_exit_code(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "kill -TERM $$"])
    assert (done.exit_code, done.signal) == (None, 15)


async def test_a_timeout_ends_the_command_and_what_it_started(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "echo started; sleep 1000 & sleep 1000"], timeout_s=0.5)
    assert done.timed_out
    assert (done.exit_code, done.signal, done.stdout) == (None, 9, b"started\n")
    assert done.wall_s < 5


async def test_leftover_processes_die_with_the_command(sandbox: ProcessSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "(while true; do echo alive >> beat; done) & sleep 0.2"], timeout_s=5)
    assert done.ok
    size = len(await sandbox.read("beat"))
    again = await sandbox.exec(["sleep", "0.2"])
    assert again.ok
    assert len(await sandbox.read("beat")) == size


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
        assert memory.exit_code == 1
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


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "link/x"])
async def test_paths_do_not_leave_the_root(sandbox: ProcessSandbox, path: str) -> None:
    await sandbox.exec(["ln", "-s", "/", "link"])
    with pytest.raises(SandboxError, match="outside"):
        await sandbox.write(path, b"x")
    with pytest.raises(SandboxError, match="outside"):
        await sandbox.read(path)


async def test_what_cannot_be_started_or_found_is_said(sandbox: ProcessSandbox) -> None:
    with pytest.raises(SandboxError, match="empty"):
        await sandbox.exec([])
    with pytest.raises(SandboxError, match="cwd"):
        await sandbox.exec(["true"], cwd="nowhere")
    with pytest.raises(SandboxError, match="cannot be read"):
        await sandbox.read("nothing")
    if sandbox.isolated:
        assert (await sandbox.exec(["no-such-command"])).exit_code not in (0, None)
    else:
        with pytest.raises(SandboxError, match="no-such-command"):
            await sandbox.exec(["no-such-command"])


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
async def test_the_host_is_out_of_reach() -> None:
    async with ProcessSandbox() as sandbox:
        done = await sandbox.exec(["sh", "-c", "touch /usr/x; ls /root /home; kill -9 -1; ls /proc | grep -c '^[0-9]'"])
        assert b"Read-only" in done.stderr
        assert int(done.stdout.split()[-1] if done.stdout.split() else 0) < 10


def test_without_bubblewrap_it_refuses_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    with pytest.raises(SandboxError, match="allow_unisolated=True"):
        ProcessSandbox()


async def test_a_closed_sandbox_says_so() -> None:
    sandbox = ProcessSandbox(allow_unisolated=True)
    with pytest.raises(SandboxError, match="not open"):
        await sandbox.exec(["true"])
