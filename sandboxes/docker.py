"""Sandboxes in containers of a Docker engine, by runc or, with a kernel of their own, by gVisor's runsc.

What starts them, and what they share: the connection, the images, the limits. A container is docker_sandbox.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from docker.types import LogConfig, Ulimit

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Limits, Snapshot
from rlagent.sandboxes.docker_connection import LABEL, Connection, call
from rlagent.sandboxes.docker_images import Images
from rlagent.sandboxes.docker_sandbox import WORK, DockerSandbox
from rlagent.sandboxes.owned_backend import OwnedBackend
from rlagent.sandboxes.owner import Owner

_GVISOR_TASKS: Final = 64  # threads of its kernel, which count as the container's


class DockerBackend(OwnedBackend):
    """Containers of one engine with the same limits. See rlagent.sandboxes.base.Backend.

    image: what `open()` without a snapshot starts from; it needs `sleep`. engine: its unix socket. runtime: one the engine knows
    ("runc", "runsc"). network: the engine's default network.
    """

    kind = "docker"

    def __init__(
        self, *, image: str | None = None, engine: Path = Path("/var/run/docker.sock"), runtime: str = "runc",
        limits: Limits | None = None, network: bool = False, state_directory: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(limits=limits, network=network, state_directory=state_directory)
        self.engine = engine
        self.gvisor = "runsc" in runtime
        self.image = image
        self._runtime = runtime
        self._connection: Connection | None = None
        self._images: Images | None = None

    @property
    def enforced(self) -> Mapping[str, str | None]:
        """Field of Limits -> by what it is enforced; None where it is not."""
        rlimit = None if self.gvisor else "rlimit"
        return {
            "wall_s": "timeout", "cpu_s": rlimit, "cpus": "cgroup", "memory_bytes": "cgroup",
            "pids": "cgroup", "disk_bytes": None, "file_size_bytes": rlimit, "open_files": "rlimit",
        }  # fmt: skip

    async def open(self, snapshot: Snapshot | None = None) -> DockerSandbox:
        """A new open sandbox."""
        owner, connection, images = self._parts
        settings = self._settings(owner.name)
        image = images.name(snapshot, self.image)
        container = await call(lambda: connection.client.containers.create(image, ["sleep", "2000000000"], **settings))
        sandbox = DockerSandbox(self, connection, container)
        self._open.add(sandbox)
        try:
            await call(container.start)
        except SandboxError:
            await sandbox.close()
            raise
        return sandbox

    async def import_directory(self, directory: Path) -> Snapshot:
        """A root filesystem as an image. Symbolic links and modes are kept."""
        return await self._parts[2].import_directory(directory)

    async def build(self, recipe: str) -> Snapshot:
        """An image from the text of a Dockerfile; its steps have no network unless the backend has."""
        return await self._parts[2].build(recipe, network=self.network)

    async def delete(self, snapshot: Snapshot) -> None:
        """Remove a snapshot's image."""
        await self._parts[2].delete(snapshot)

    async def keep(self, container: Any) -> Snapshot:
        """A container's files as an image. For DockerSandbox."""
        return await self._parts[2].commit(container)

    def forget(self, sandbox: DockerSandbox) -> None:
        """For DockerSandbox."""
        self._open.discard(sandbox)

    async def _enter(self) -> None:
        self._connection = await Connection.open(self.engine)
        self._images = Images(self._connection, self._opened.name)

    async def _sweep(self, name: str) -> None:
        _, connection, _ = self._parts
        await connection.remove(name)

    async def _leave(self, name: str) -> None:
        if self._connection is None:
            return
        await self._connection.remove(name)
        self._connection.close()

    @property
    def _parts(self) -> tuple[Owner, Connection, Images]:
        owner = self._opened
        assert self._connection is not None
        assert self._images is not None
        return owner, self._connection, self._images

    def _settings(self, owner: str) -> dict[str, Any]:
        """What a container is created with, in docker-py's words."""
        limits = self.limits
        bounds = [("nofile", limits.open_files)]
        if not self.gvisor:
            bounds += [("fsize", limits.file_size_bytes), ("cpu", limits.cpu_s)]
        return {
            "runtime": self._runtime, "working_dir": str(WORK), "labels": {LABEL: owner},
            "network_mode": None if self.network else "none", "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"],
            "mem_limit": limits.memory_bytes, "memswap_limit": limits.memory_bytes,
            "pids_limit": limits.pids and limits.pids + 1 + (_GVISOR_TASKS if self.gvisor else 0),
            "nano_cpus": None if limits.cpus is None else int(limits.cpus * 1e9),
            "ulimits": [Ulimit(name=name, soft=value, hard=value) for name, value in bounds if value is not None],
            "log_config": LogConfig(type="none"),
        }  # fmt: skip
