"""A door for a command without network: one listening port on its own loopback, answered from outside.

In the flow: a command is held back in its new namespaces (hold.py); this file, run as a script by a process of its own, enters the
network namespace, opens a listening socket there and hands it to us; what serves it runs on our side; then the command begins.
A socket belongs to the namespace it was made in, so nothing of the host's network is let in: only what the server answers.
Invariant: the script imports nothing but the standard library, and works for the owner of the namespaces as for root.
"""

import asyncio
import ctypes
import fcntl
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlagent.sandboxes.base import Door

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_NS_GET_USERNS = 0xB701
_BACKLOG = 128


@asynccontextmanager
async def serving(pid: int, door: "Door") -> AsyncIterator[None]:
    """Open and serve the door of a command that is held back, by the host's id of its first process. SandboxError."""
    with await _listen(pid, door.port) as listening:
        async with door.serve(listening):
            yield


async def _listen(pid: int, port: int) -> socket.socket:
    """A socket that listens on `port` in the network namespace of a process. SandboxError."""
    from rlagent.errors import SandboxError

    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", __file__, str(theirs.fileno()), str(pid), str(port),
            pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        if process.returncode != 0:
            why = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxError(f"no port can be opened in the sandbox's network namespace: {why}; give it network=True")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    listening = socket.socket(fileno=descriptors[0])
    listening.setblocking(False)
    return listening


def _send(descriptor: int, pid: int, port: int) -> None:
    """In the script: enter, listen, hand over."""
    libc = ctypes.CDLL(None, use_errno=True)
    net = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    user = fcntl.ioctl(net, _NS_GET_USERNS)  # the process's own may lie inside it by now
    # Root of the host enters at once; the owner of the user namespace after entering that one.
    if libc.setns(net, _CLONE_NEWNET) != 0 and (
        libc.setns(user, _CLONE_NEWUSER) != 0 or libc.setns(net, _CLONE_NEWNET) != 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("0.0.0.0", port))  # its loopback may not be up yet; there is nothing else
    listening.listen(_BACKLOG)
    with socket.socket(fileno=descriptor) as theirs:
        socket.send_fds(theirs, [b"x"], [listening.fileno()])


if __name__ == "__main__":
    _send(*map(int, sys.argv[1:4]))
