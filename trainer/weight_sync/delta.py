"""Lossless deltas of a policy: what changed in each tensor, as positions and new values, or the whole tensor where that is smaller.

Pure, but for the files. In the flow: shadow.py writes one per push and applies it to the copy that engines load. A delta is compared
bit by bit, so -0.0 and NaN payloads survive. Invariant: apply(base, encode(base, new)) is new, bit for bit, and a delta that is applied
to anything but its base is refused.

File: safetensors. `NAME#at` int32 [k] and `NAME#to` [k] where k elements changed, `NAME` where it is dense, nothing where nothing
changed; metadata: version, base (version and digest of what it starts from) and digest (of the result).
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlagent.errors import WeightSyncError

_AT: Final = "#at"
_TO: Final = "#to"
_POSITION_BYTES: Final = 4
_MAX_SPARSE: Final = 2**31  # elements that an int32 position reaches
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """From one version to the next. base is None for a full one."""

    version: int
    digest: str  # of the result
    base: int | None
    base_digest: str
    tensors: Tensors

    @property
    def num_bytes(self) -> int:
        """Size of what changed."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def digest_of(tensors: Tensors) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def encode(base: Tensors, new: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What must be stored to get from `base` to `new`. Every tensor of `new` is on the CPU."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in new:
        old = base.get(name)
        if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape) or tensor.numel() >= _MAX_SPARSE:
            found[name] = tensor
            continue
        flat = _bits(tensor)
        changed = _bits(old) != flat
        count = int(changed.sum())  # before the positions, which take eight bytes each
        if count * (_POSITION_BYTES + tensor.element_size()) >= tensor.nbytes:
            found[name] = tensor
        elif count:
            at = torch.nonzero(changed).flatten()
            found[name + _AT], found[name + _TO] = at.to(torch.int32), flat[at].view(tensor.dtype)
    return found


def apply(base: Tensors, stored: Tensors) -> dict[str, torch.Tensor]:
    """The tensors that a delta leads to; `base` is left as it is."""
    found = dict(base)
    for name, tensor in stored.items():
        if name.endswith(_AT):
            whole = name.removesuffix(_AT)
            changed = base[whole].clone().contiguous()
            _bits(changed)[tensor.long()] = _bits(stored[whole + _TO])
            found[whole] = changed
        elif not name.endswith(_TO):
            found[name] = tensor
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view as integers of the elements' size: float8 has no comparison and no assignment by position."""
    return tensor.contiguous().flatten().view(_BITS[tensor.element_size()])


def write(delta: Delta, path: Path) -> None:
    """Write a delta; it appears whole."""
    metadata = {"version": str(delta.version), "digest": delta.digest, "base_digest": delta.base_digest}
    if delta.base is not None:
        metadata["base"] = str(delta.base)
    partial = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in delta.tensors.items()}, partial, metadata=metadata)
    partial.rename(path)


def read(path: Path) -> Delta:
    """Read a delta. WeightSyncError when it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata()
            return Delta(
                version=int(meta["version"]), digest=meta["digest"], base_digest=meta["base_digest"],
                base=int(meta["base"]) if "base" in meta else None,
                tensors={name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118 (not a dict)
            )  # fmt: skip
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(f"delta {path} cannot be read: {error}; publish a full version") from error
