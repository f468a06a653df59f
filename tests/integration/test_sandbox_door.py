"""The one door of a command without network, opened by root, for a sandbox with a user of its own, and by the owner of its namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sandbox_backends import BWRAP, needs_bwrap

from rlagent.sandboxes import door as door_script
from rlagent.sandboxes.base import Door
from rlagent.sandboxes.process_backend import ProcessBackend

pytestmark = needs_bwrap
KNOCK = "exec 3<>/dev/tcp/127.0.0.1/8000; head -1 <&3"
PLAIN_USER = 1_599_999_999  # owns nothing, and is below the users that sandboxes take


@asynccontextmanager
async def hello(listening: socket.socket) -> AsyncIterator[None]:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, sock=listening)
    try:
        yield
    finally:
        server.close()


@pytest.mark.parametrize("control_groups", [True, False])
async def test_commands_of_every_kind_of_sandbox_reach_their_own_door(control_groups: bool) -> None:
    async with ProcessBackend(control_groups=control_groups) as backend, await backend.open() as sandbox:
        knocks = (sandbox.exec(["bash", "-c", KNOCK], door=Door(port=8000, serve=hello)) for _ in range(2))
        for done in await asyncio.gather(*knocks):  # the same port: each has a network of its own
            assert (done.stdout, done.stderr) == (b"hello\n", b"")
        assert b"refused" in (await sandbox.exec(["bash", "-c", KNOCK])).stderr


def test_a_plain_user_opens_the_door_of_its_own_namespaces() -> None:
    """As the script is run by a user who is not root. Its python must be one that such a user may start."""
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None or not _readable_by_all(Path(door_script.__file__)):
        pytest.skip("needs root, /usr/bin/python3, and a checkout that other users may read")
    assert BWRAP is not None
    user = {"user": PLAIN_USER, "group": PLAIN_USER, "extra_groups": []}
    told, tell = os.pipe()
    held, let_go = os.pipe()
    isolation = [BWRAP, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    waits = ["--block-fd", str(held), "--json-status-fd", str(tell), "--", "bash", "-c", KNOCK]
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        subprocess.Popen([*isolation, *waits], pass_fds=(held, tell), stdout=subprocess.PIPE, **user) as command,  # type: ignore[call-overload]
    ):
        os.close(tell)
        with os.fdopen(told, "rb") as status:
            pid = json.loads(status.readline())["child-pid"]
            script = [python, "-I", "-S", door_script.__file__, str(theirs.fileno()), str(pid), "8000"]
            subprocess.run(script, pass_fds=[theirs.fileno()], check=True, **user)  # type: ignore[call-overload]
            _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
            with socket.socket(fileno=descriptor) as listening:
                os.write(let_go, b"x")
                listening.settimeout(60)
                with listening.accept()[0] as guest:
                    guest.sendall(b"hello\n")
            assert command.communicate(timeout=60)[0] == b"hello\n"
    os.close(held)
    os.close(let_go)


def _readable_by_all(path: Path) -> bool:
    found = path.resolve()
    return bool(found.stat().st_mode & 0o4) and all(part.stat().st_mode & 0o1 for part in found.parents)
