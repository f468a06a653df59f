"""A sandbox in one container of a Docker engine, whose first process sleeps; a command is an exec in it (docker_exec.py)."""

import asyncio
import io
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, Door, ExecResult, Snapshot
from rlagent.sandboxes.docker_connection import Connection, call
from rlagent.sandboxes.docker_exec import ContainerExec
from rlagent.sandboxes.ending import check_bytes, code_or_signal, result, time_allowed

if TYPE_CHECKING:
    from rlagent.sandboxes.docker import DockerBackend

WORK: Final = PurePosixPath("/work")


class DockerSandbox:
    """One container. See rlagent.sandboxes.base.Sandbox; made by DockerBackend.open."""

    def __init__(self, backend: "DockerBackend", connection: Connection, container: Any) -> None:
        self._backend, self._connection, self._container = backend, connection, container
        self._closed = False
        self._busy = asyncio.Lock()  # one command at a time: the end of one sweeps the container

    @property
    def network(self) -> bool:
        """Whether commands have the engine's default network."""
        return self._backend.network

    @property
    def enforced(self) -> Mapping[str, str | None]:
        """Field of Limits -> by what it is enforced."""
        return self._backend.enforced

    @property
    def gvisor(self) -> bool:
        """Whether it has a kernel of its own."""
        return self._backend.gvisor

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes | None = None, env: Mapping[str, str] | None = None, cwd: str = ".",
        timeout_s: float | None = None, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES, door: Door | None = None,
    ) -> ExecResult:  # fmt: skip
        """Run a command to its end. Commands of one sandbox run one after another."""
        if door is not None:
            raise SandboxError(
                "containers have no doors; give the docker backend network=True, or use a process sandbox"
            )
        allowed_s, where = time_allowed(argv, timeout_s, self._backend.limits), str(self._inside(cwd))
        async with self._busy:
            run = ContainerExec(
                self._connection, self._opened, gvisor=self.gvisor, output_limit_bytes=output_limit_bytes
            )
            began = time.perf_counter()
            await run.run(argv, stdin=stdin or b"", env=env or {}, cwd=where, timeout_s=allowed_s)
        ending = (None, 9) if run.timed_out or run.exit_code is None else code_or_signal(run.exit_code)
        return result(
            ending, timed_out=run.timed_out, starved=await run.was_starved(ending[1]), truncated=run.stream.truncated,
            stdout=bytes(run.stream.stdout), stderr=bytes(run.stream.stderr), began=began,
        )  # fmt: skip

    async def read(self, path: str) -> bytes:
        """A regular file's content. Links are followed on the way to it only."""
        target, container = self._inside(path), self._opened

        def get() -> bytes:
            parts, _ = container.get_archive(str(target))
            with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as archive:
                member = archive.next()
                file = archive.extractfile(member) if member is not None and member.isreg() else None
                if file is None:
                    raise SandboxError(f"{path!r} is not a regular file")
                return file.read()

        return await call(get)

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file."""
        check_bytes(path, data)
        member = tarfile.TarInfo(str(self._inside(path)).lstrip("/"))
        member.size, member.mode = len(data), 0o644
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            archive.addfile(member, io.BytesIO(data))
        await self._put("/", content.getvalue())

    async def upload(self, directory: Path, path: str = ".") -> None:
        """Copy a directory's content in."""
        target = str(self._inside(path)).lstrip("/")

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            member.uid = member.gid = 0
            return member if member.isreg() or member.isdir() else None

        def pack() -> bytes:
            if not directory.is_dir():
                raise SandboxError(f"{str(directory)!r} cannot be uploaded: it is not a directory")
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w", dereference=False) as archive:
                archive.add(directory, arcname=target, filter=plain)
            return content.getvalue()

        await self._put("/", await asyncio.to_thread(pack))

    async def snapshot(self) -> Snapshot:
        """Keep its files as an image."""
        if self._busy.locked():
            raise SandboxError("a snapshot cannot be taken while a command runs; wait for it")
        return await self._backend.keep(self._opened)

    async def fork(self) -> "DockerSandbox":
        """A new container from its files."""
        return await self._backend.open(await self.snapshot())

    async def close(self) -> None:
        """Remove the container."""
        if not self._closed:
            self._closed = True
            self._backend.forget(self)
            await call(lambda: self._container.remove(force=True, v=True))

    @property
    def _opened(self) -> Any:
        if self._closed:
            raise SandboxError("the sandbox is not open")
        return self._container

    def _inside(self, path: str) -> PurePosixPath:
        """Where a path lies in the container. Links of the container lead within the container only: the engine follows them there."""
        parts: list[str] = []
        target = WORK / path
        for part in target.parts[1:]:
            if part == "..":
                parts = parts[:-1]
            else:
                parts.append(part)
        found = PurePosixPath("/", *parts)
        if not found.is_relative_to(WORK) or "\0" in path:
            raise SandboxError(f"path {path!r} leads outside the sandbox")
        return found

    async def _put(self, where: str, content: bytes) -> None:
        container = self._opened
        await call(lambda: container.put_archive(where, content))
