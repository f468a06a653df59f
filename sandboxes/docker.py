"""Sandboxes in containers of a Docker engine, by runc or, with a kernel of their own, by gVisor's runsc.

A sandbox is one container whose first process sleeps; a command is an exec in it. Invariant: when `exec` returns, that sleeper is the
only process left: where another is, or the container did not survive the command, the container is killed and started again,
which keeps its files. The engine is talked to over its unix socket.
"""

import asyncio
import io
import signal
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import docker
from docker.errors import DockerException, NotFound
from docker.types import LogConfig, Ulimit

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, MEMORY_WORDS, Door, ExecResult, Limits, Snapshot
from rlagent.sandboxes.bubblewrap import Status
from rlagent.sandboxes.docker_stream import ExecStream
from rlagent.sandboxes.owner import Owner, default_state_directory

T = TypeVar("T")
WORK: Final = PurePosixPath("/work")
_KIND: Final = "docker"
_LABEL: Final = "rlagent.owner"
_LOOK_S: Final = 0.5  # how often a running command's container is looked at: it may have died under it
_TOLD_S: Final = 0.5  # within which the engine knows that a process ran out of memory
_GVISOR_TASKS: Final = 64  # threads of its kernel, which count as the container's
_START_FAILED: Final = b"OCI runtime exec failed"
_LOST_CODE: Final = 128  # what runsc ends with when its kernel died under the command
_DYING_S: Final = 3.0  # within which the engine knows of that death


class DockerBackend:
    """Containers of one engine with the same limits. See rlagent.sandboxes.base.Backend.

    image: what `open()` without a snapshot starts from; it needs `sleep`. engine: its unix socket. runtime: one the engine knows
    ("runc", "runsc"). network: the engine's default network.
    """

    def __init__(
        self, *, image: str | None = None, engine: Path = Path("/var/run/docker.sock"), runtime: str = "runc",
        limits: Limits | None = None, network: bool = False, state_directory: Path | None = None,
    ) -> None:  # fmt: skip
        self.limits = limits or Limits()
        self.engine = engine
        self.gvisor = "runsc" in runtime
        self.image = image
        self._runtime, self.network = runtime, network
        self._state = state_directory or default_state_directory()
        self._owner: Owner | None = None
        self._client: Any = None
        self._open: set[DockerSandbox] = set()
        self._images: list[str] = []  # as they were made
        self._deleted: set[str] = set()

    @property
    def enforced(self) -> Mapping[str, str | None]:
        """Field of Limits -> by what it is enforced; None where it is not."""
        rlimit = None if self.gvisor else "rlimit"
        return {
            "wall_s": "timeout", "cpu_s": rlimit, "cpus": "cgroup", "memory_bytes": "cgroup",
            "pids": "cgroup", "disk_bytes": None, "file_size_bytes": rlimit, "open_files": "rlimit",
        }  # fmt: skip

    async def __aenter__(self) -> Self:
        self._owner = await asyncio.to_thread(Owner, self._state, _KIND)
        try:
            self._client = await _call(lambda: docker.DockerClient(base_url=f"unix://{self.engine}"))
            for name in self._owner.dead(_KIND):
                await _call(partial(self._remove, name))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, snapshot: Snapshot | None = None) -> "DockerSandbox":
        """A new open sandbox."""
        owner, client = self._opened
        image = snapshot.name if snapshot else self.image
        if image in self._deleted:
            raise SandboxError(f"snapshot {image!r} was deleted")
        if image is None:
            raise SandboxError(
                "DockerBackend has no image; give image=, or open a snapshot made by import_directory or build"
            )
        limits = self.limits
        bounds = [("nofile", limits.open_files)]
        if not self.gvisor:
            bounds += [("fsize", limits.file_size_bytes), ("cpu", limits.cpu_s)]
        container = await _call(lambda: client.containers.create(
            image, ["sleep", "2000000000"], runtime=self._runtime, working_dir=str(WORK), labels={_LABEL: owner.name},
            network_mode=None if self.network else "none", cap_drop=["ALL"], security_opt=["no-new-privileges"],
            mem_limit=limits.memory_bytes, memswap_limit=limits.memory_bytes,
            pids_limit=limits.pids and limits.pids + 1 + (_GVISOR_TASKS if self.gvisor else 0),
            nano_cpus=None if limits.cpus is None else int(limits.cpus * 1e9),
            ulimits=[Ulimit(name=name, soft=value, hard=value) for name, value in bounds if value is not None],
            log_config=LogConfig(type="none"),
        ))  # fmt: skip
        sandbox = DockerSandbox(self, container)
        self._open.add(sandbox)
        try:
            await _call(container.start)
        except SandboxError:
            await sandbox.close()
            raise
        return sandbox

    async def import_directory(self, directory: Path) -> Snapshot:
        """A root filesystem as an image. Symbolic links and modes are kept."""
        _, client = self._opened

        def put() -> str:
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w") as archive:
                archive.add(directory, arcname=".")
            answer = client.api.import_image_from_data(
                content.getvalue(), repository="rlagent", tag=directory.name.lower()
            )
            return str(client.images.get(answer.split('"status":"')[1].split('"')[0]).id)

        return self._made(await _call(put))

    async def build(self, recipe: str) -> Snapshot:
        """An image from the text of a Dockerfile; its steps have no network unless the backend has."""
        _, client = self._opened
        image, _log = await _call(lambda: client.images.build(
            fileobj=io.BytesIO(recipe.encode()), rm=True, forcerm=True, network_mode=None if self.network else "none",
        ))  # fmt: skip
        return self._made(str(image.id))

    async def delete(self, snapshot: Snapshot) -> None:
        """Remove a snapshot's image."""
        if snapshot.name in self._images and snapshot.name not in self._deleted:
            self._deleted.add(snapshot.name)
            with suppress(SandboxError):  # images made from it hold it until close
                await _call(lambda: self._remove_image(snapshot.name))
                self._images.remove(snapshot.name)

    async def close(self) -> None:
        """Remove every container and snapshot."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        try:
            if self._client is not None:
                await _call(lambda: self._remove(owner.name))
                for name in reversed(self._images):  # what was made from another goes before it
                    await _call(partial(self._remove_image, name))
                self._client.close()
        finally:
            await asyncio.to_thread(owner.close)

    async def keep(self, container: Any) -> Snapshot:
        """A container's files as an image. For DockerSandbox."""
        image = await _call(container.commit)
        return self._made(str(image.id))

    def events(self, container: str, since: float, until: float) -> Iterator[Any]:
        """Want of memory in a container between two times. For DockerSandbox."""
        found: Iterator[Any] = self._client.events(
            since=since, until=until, filters={"container": container, "event": "oom"}
        )
        return found

    def inspect(self, exec_id: str) -> Any:
        """What the engine knows of an exec. For DockerSandbox."""
        return self._client.api.exec_inspect(exec_id)

    def forget(self, sandbox: "DockerSandbox") -> None:
        """For DockerSandbox."""
        self._open.discard(sandbox)

    def _made(self, image: str) -> Snapshot:
        self._images.append(image)
        return Snapshot(name=image)

    def _remove_image(self, name: str) -> None:
        with suppress(NotFound):  # gone with the last one made from it
            self._client.images.remove(name, force=True)

    def _remove(self, owner: str) -> None:
        for container in self._client.containers.list(all=True, filters={"label": f"{_LABEL}={owner}"}):
            container.remove(force=True, v=True)

    @property
    def _opened(self) -> tuple[Owner, Any]:
        if self._owner is None:
            raise SandboxError("the backend is not open; use it as `async with DockerBackend(image=...) as backend:`")
        return self._owner, self._client


class DockerSandbox:
    """One container. See rlagent.sandboxes.base.Sandbox; made by DockerBackend.open."""

    def __init__(self, backend: DockerBackend, container: Any) -> None:
        self._backend, self._container = backend, container
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
        if not argv:
            raise SandboxError("argv is empty; give a command and its arguments")
        bounds = [bound for bound in (timeout_s, self._backend.limits.wall_s) if bound is not None]
        where = str(self._inside(cwd))
        async with self._busy:
            since = time.time()
            api = self._opened.client.api
            made = await _call(lambda: api.exec_create(
                self._container.id, list(argv), stdin=True, environment=dict(env or {}), workdir=where
            ))  # fmt: skip
            began, stream, timed_out, clean = time.perf_counter(), ExecStream(output_limit_bytes), False, False
            try:
                async with asyncio.timeout(min(bounds, default=None)):
                    await self._watched(stream.run(self._backend.engine, made["Id"], stdin or b""))
                clean = True
            except TimeoutError:
                timed_out = True
            finally:
                exit_code = None if timed_out else await self._exit_code(made["Id"])
                if self.gvisor and exit_code == _LOST_CODE and await self._dies():
                    exit_code = None
                starved = await asyncio.shield(self._sweep(dirty=not clean))
        if stream.refused or bytes(stream.stdout).startswith(_START_FAILED):
            raise SandboxError(
                f"{argv[0]!r} cannot be started in the sandbox: {stream.refused or bytes(stream.stdout).decode()}"
            )
        code, signalled = (None, 9) if timed_out or exit_code is None else Status(exit_code).ending
        starved |= signalled == signal.SIGKILL and not timed_out and await self._was_starved(since)
        starved |= any(words in stream.stderr for words in MEMORY_WORDS)
        return ExecResult(
            exit_code=code, signal=signalled, timed_out=timed_out, out_of_memory=not timed_out and code != 0 and starved,
            truncated=stream.truncated, stdout=bytes(stream.stdout), stderr=bytes(stream.stderr), wall_s=time.perf_counter() - began,
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

        return await _call(get)

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file."""
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
            await _call(lambda: self._container.remove(force=True, v=True))

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
        await _call(lambda: container.put_archive(where, content))

    async def _watched(self, running: Any) -> None:
        """Until the command ends, or its container has."""
        task = asyncio.ensure_future(running)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                if not (await self._state())["Running"]:
                    return
            task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _state(self) -> Any:
        await _call(self._container.reload)
        return self._container.attrs["State"]

    async def _was_starved(self, since: float) -> bool:
        """Whether the engine tells of a process of this container that was ended for want of memory; it may learn of it a little later."""
        events = self._backend.events(self._container.id, since, time.time() + _TOLD_S)
        return bool(await _call(lambda: list(events)))

    async def _exit_code(self, exec_id: str) -> int | None:
        """None when the container went before it."""
        with suppress(SandboxError):
            code: int | None = (await _call(lambda: self._backend.inspect(exec_id)))["ExitCode"]
            return code
        return None

    async def _dies(self) -> bool:
        """Whether the container is dead or dying."""
        with suppress(SandboxError):
            await _call(lambda: self._container.wait(timeout=_DYING_S))
            return True
        return False

    async def _sweep(self, *, dirty: bool) -> bool:
        """Leave the sleeper alone in its container. Whether the engine says that the container ran out of memory."""
        state = await self._state()
        dead, starved = not state["Running"], bool(state["OOMKilled"])
        if not (dead or starved or dirty):
            dirty = len((await _call(self._container.top))["Processes"]) > 1
        if dead or starved or dirty:
            if not dead:
                await _call(lambda: self._container.kill("KILL"))
                await _call(self._container.wait)
            await _call(self._container.start)
        return starved


async def _call(function: Callable[[], T]) -> T:
    """A call of the engine, in a thread. SandboxError for what it refuses."""
    try:
        return await asyncio.to_thread(function)
    except NotFound as error:
        raise SandboxError(f"the engine does not find it: {error.explanation}") from error
    except (DockerException, OSError) as error:
        raise SandboxError(f"the Docker engine refused: {error}") from error
