"""Mount namespaces of ours, one for each sandbox, entered by threads that do nothing else.

What is mounted in one is seen there only, and is gone with the last descriptor and process in it: a killed owner leaves no mount.
"""

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar

from rlagent.errors import SandboxError

T = TypeVar("T")
_CLONE_FS: Final = 0x00000200
_CLONE_NEWNS: Final = 0x00020000
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
_MS_REC: Final = 16384
_MS_SLAVE: Final = 1 << 19
_THREADS: Final = 4  # file copies and process starts at once

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    """mount(2). OSError."""
    _check(
        _libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode()), target
    )


def _check(result: int, name: Path | None = None) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(name) if name else None)


class Launcher:
    """Threads that run functions in a mount namespace, and as a user of files, of choice.

    A child started here dies with its thread (bubblewrap asks for that), so the threads live until `close`.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._own = threading.local()

    def run(self, function: Callable[[], T], *, namespace: int | None = None, user: int = 0) -> "asyncio.Future[T]":
        """`call` in one of the threads. It is run to its end also when the future is cancelled."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"sandbox-{i}", daemon=True) for i in range(_THREADS)
            ]
            for thread in self._threads:
                thread.start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                settle = partial(_set_result, answer, self.call(function, namespace=namespace, user=user))
            except BaseException as error:
                settle = partial(_set_error, answer, error)
            with suppress(RuntimeError):  # the loop was closed, and nobody waits
                loop.call_soon_threadsafe(settle)

        self._waiting.put(work)
        return answer

    async def can_mount(self) -> bool:
        """Whether namespaces of ours can be made."""
        try:
            await self.run(lambda: os.close(self.new_namespace(lambda: None)))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End the threads, when they have done what waits."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        # Each thread's descriptor of the first namespace goes with the thread's locals.

    def _work(self) -> None:
        # A thread must not share its working directory with others to enter a namespace.
        _libc.unshare(_CLONE_FS)
        self._own.home = _Descriptor("/proc/thread-self/ns/mnt")
        while (work := self._waiting.get()) is not None:
            work()

    def new_namespace(self, fill: Callable[[], None]) -> int:
        """In one of the threads: a descriptor of a new namespace in which `fill` has mounted. OSError where that is not allowed."""
        _check(_libc.unshare(_CLONE_NEWNS))
        try:
            mount("none", Path("/"), "none", _MS_REC | _MS_SLAVE)
            fill()
            return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            _check(_libc.setns(self._own.home.number, _CLONE_NEWNS))

    def call(self, function: Callable[[], T], *, namespace: int | None = None, user: int = 0) -> T:
        """In one of the threads: the function's result.

        `namespace` is a descriptor of one; `user`, if not 0, owns the files that are made.
        """
        if namespace is not None and _libc.setns(namespace, _CLONE_NEWNS) != 0:
            raise SandboxError(f"the sandbox's mounts cannot be entered: {os.strerror(ctypes.get_errno())}")
        if user:
            _libc.setfsgid(user)
            _libc.setfsuid(user)
        try:
            return function()
        finally:
            if user:
                _libc.setfsuid(0)
                _libc.setfsgid(0)
            if namespace is not None:
                _check(_libc.setns(self._own.home.number, _CLONE_NEWNS))


def _set_result(answer: "asyncio.Future[T]", result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _set_error(answer: "asyncio.Future[T]", error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)


class _Descriptor:
    """Closed when nothing refers to it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.number)
