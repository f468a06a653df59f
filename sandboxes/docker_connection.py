"""The connection to a Docker engine, over its unix socket: every call in a thread, and a refusal as a SandboxError."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import docker
from docker.errors import DockerException, NotFound

from rlagent.errors import SandboxError

T = TypeVar("T")
LABEL: Final = "rlagent.owner"  # of every container and image: who made it


class Connection:
    """To the engine at `socket`. `client` is docker-py's, whose answers have no types."""

    def __init__(self, socket: Path, client: Any) -> None:
        self.socket, self.client = socket, client

    @classmethod
    async def open(cls, socket: Path) -> "Connection":
        """SandboxError where no engine answers."""
        return cls(socket, await call(lambda: docker.DockerClient(base_url=f"unix://{socket}")))

    async def remove(self, owner: str) -> None:
        """All containers and images that an owner made."""
        of = {"label": f"{LABEL}={owner}"}

        def remove() -> None:
            for container in self.client.containers.list(all=True, filters=of):
                container.remove(force=True, v=True)
            made = self.client.images.list(all=True, filters=of)
            for image in sorted(
                made, key=lambda image: str(image.attrs["Created"]), reverse=True
            ):  # the latest may be of others
                with suppress(NotFound):  # gone with the last one made from it
                    self.client.images.remove(image.id, force=True)

        await call(remove)

    async def had_no_memory(self, container: str, since: float, until: float) -> bool:
        """Whether the engine tells of want of memory in a container between two times; it waits for the later one."""
        asked = {"container": container, "event": "oom"}
        return bool(await call(lambda: list(self.client.events(since=since, until=until, filters=asked))))

    def close(self) -> None:
        """Leave the engine."""
        self.client.close()


async def call(function: Callable[[], T]) -> T:
    """A call of the engine, in a thread. SandboxError for what it refuses."""
    try:
        return await asyncio.to_thread(function)
    except NotFound as error:
        raise SandboxError(f"the engine does not find it: {error.explanation}") from error
    except (DockerException, OSError) as error:
        raise SandboxError(f"the Docker engine refused: {error}") from error
