"""The images of a docker backend: made from a directory, a recipe or a sandbox's files, and removed with it.

Invariant: nothing is downloaded unless a recipe's text asks for it.
"""

import io
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from docker.errors import NotFound

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Snapshot
from rlagent.sandboxes.docker_connection import LABEL, Connection, call


class Images:
    """Those of one backend, by whose name they are found and removed in the end (Connection.remove)."""

    def __init__(self, connection: Connection, owner: str) -> None:
        self._connection, self._owner = connection, owner
        self._made: list[str] = []
        self._deleted: set[str] = set()

    def name(self, snapshot: Snapshot | None, default: str | None) -> str:
        """What to start from. SandboxError."""
        image = snapshot.name if snapshot else default
        if image in self._deleted:
            raise SandboxError(f"snapshot {image!r} was deleted")
        if image is None:
            raise SandboxError(
                "DockerBackend has no image; give image=, or open a snapshot made by import_directory or build"
            )
        return image

    async def import_directory(self, directory: Path) -> Snapshot:
        """A root filesystem. Symbolic links and modes are kept."""
        client = self._connection.client

        def put() -> str:
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w") as archive:
                archive.add(directory, arcname=".")
            answer = client.api.import_image_from_data(
                content.getvalue(),
                repository="rlagent",
                tag=directory.name.lower(),
                changes=[f"LABEL {LABEL}={self._owner}"],
            )
            return str(client.images.get(answer.split('"status":"')[1].split('"')[0]).id)

        return self._kept(await call(put))

    async def build(self, recipe: str, *, network: bool) -> Snapshot:
        """The text of a Dockerfile."""
        image, _log = await call(lambda: self._connection.client.images.build(
            fileobj=io.BytesIO(recipe.encode()), rm=True, forcerm=True, network_mode=None if network else "none",
            labels={LABEL: self._owner},
        ))  # fmt: skip
        return self._kept(str(image.id))

    async def commit(self, container: Any) -> Snapshot:
        """A container's files; the image has the container's labels."""
        image = await call(container.commit)
        return self._kept(str(image.id))

    async def delete(self, snapshot: Snapshot) -> None:
        """Remove it, as soon as no image made from it holds it."""
        if snapshot.name in self._made and snapshot.name not in self._deleted:
            self._deleted.add(snapshot.name)
            with suppress(SandboxError):  # images made from it hold it until close
                await call(lambda: self._remove(snapshot.name))
                self._made.remove(snapshot.name)

    def _kept(self, image: str) -> Snapshot:
        self._made.append(image)
        return Snapshot(name=image)

    def _remove(self, name: str) -> None:
        with suppress(NotFound):  # gone with the last one made from it
            self._connection.client.images.remove(name, force=True)
