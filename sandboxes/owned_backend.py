"""The life of a backend: entered, it owns a directory and takes away what dead ones of its kind left; closed, it gives all back."""

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Limits, Sandbox
from rlagent.sandboxes.owner import Owner, default_state_directory


class OwnedBackend(ABC):
    """What backends have in common. `kind` stands in the names of what they own; only those of one kind sweep up after each other."""

    kind: str

    def __init__(self, *, limits: Limits | None, network: bool, state_directory: Path | None) -> None:
        self.limits = limits or Limits()
        self.network = network
        self._state = state_directory or default_state_directory()
        self._owner: Owner | None = None
        self._open: set[Sandbox] = set()

    async def __aenter__(self) -> Self:
        owner = self._owner = await asyncio.to_thread(Owner, self._state, self.kind)
        try:
            await self._enter()
            for name in owner.dead(self.kind):
                await self._sweep(name)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every sandbox, delete every file and snapshot."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        try:
            await self._leave(owner.name)
        finally:
            await asyncio.to_thread(owner.close)

    @abstractmethod
    async def _enter(self) -> None:
        """Find out what this machine allows. SandboxError where it is too little."""

    @abstractmethod
    async def _sweep(self, name: str) -> None:
        """Take away what bears the name of a dead owner, but for its directory."""

    @abstractmethod
    async def _leave(self, name: str) -> None:
        """Take away all that bears our name, but for our directory. After an `_enter` that failed too."""

    @property
    def _opened(self) -> Owner:
        if self._owner is None:
            raise SandboxError(
                f"the backend is not open; use it as `async with {type(self).__name__}(...) as backend:`"
            )
        return self._owner
