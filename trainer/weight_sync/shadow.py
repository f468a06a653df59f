"""The shadow copy: a model directory beside the engines that deltas keep current, and the chain of deltas that led to it.

In the flow: the delta transport writes a version's delta into the chain, the shadow applies it and becomes what engines load from disk.
Where learner and engines do not share a machine, the chain's folder is what travels. Invariant: the shadow changes from one whole
version to the next; each link is checked, its base before it is applied and its result after.
"""

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from rlagent.errors import WeightSyncError
from rlagent.trainer.weight_sync.delta import Delta, apply, digest_of, encode, read, write

MAX_LINKS: Final = 8
"""Links of a chain before a full one starts it anew: a reader that joins reads no more than these."""


class Chain:
    """The learner's end: what was pushed last, and the files that lead to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, torch.Tensor] = {}
        self._last: Delta | None = None
        self._links: list[Path] = []

    def add(self, version: int, tensors: dict[str, torch.Tensor]) -> tuple[Path, Delta]:
        """Write the delta from the last version to this one; a full one where there is none, or the chain is long."""
        full = self._last is None or len(self._links) >= MAX_LINKS
        delta = Delta(
            version=version, digest=digest_of(tensors), tensors=tensors if full else encode(self._held, tensors.items()),
            base=None if full or self._last is None else self._last.version,
            base_digest="" if full or self._last is None else self._last.digest,
        )  # fmt: skip
        path = self._directory / f"delta-{version:06d}.safetensors"
        write(delta, path)
        if full:
            for link in self._links:
                link.unlink(missing_ok=True)
            self._links.clear()
        self._links.append(path)
        self._held, self._last = tensors, delta
        return path, delta

    def forget(self) -> None:
        """The last link did not arrive: the next one is full."""
        self._last = None


class Shadow:
    """The engines' end: a model directory that is always one whole version. `weights_file` is replaced at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.version: int | None = None
        self._digest = ""
        self._held: dict[str, torch.Tensor] = {}

    def take(self, path: Path) -> None:
        """Apply one link. WeightSyncError where it does not follow what the shadow holds, or leads elsewhere than it says."""
        delta = read(path)
        if delta.base is not None and (delta.base, delta.base_digest) != (self.version, self._digest):
            raise WeightSyncError(
                f"delta {path} starts from version {delta.base}, and the shadow copy holds {self.version}; publish a full version"
            )
        tensors = apply(self._held if delta.base is not None else {}, delta.tensors)
        if digest_of(tensors) != delta.digest:
            raise WeightSyncError(
                f"delta {path} does not lead to version {delta.version}: checksums differ; publish a full version"
            )
        partial = self.directory / "model.part"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(self.directory / "model.safetensors")
        self.version, self._digest, self._held = delta.version, delta.digest, tensors
