"""Tensors laid into flat uint8 buckets, in the order they come."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from rlagent.trainer.weight_sync.sglang_pickle import TensorSlot

ALIGNMENT: Final = 16  # bytes; a misaligned start cannot be viewed as a wider dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A flat uint8 buffer [size] and where its tensors lie."""

    flat: torch.Tensor
    slots: tuple[TensorSlot, ...]

    def tensor(self, slot: TensorSlot) -> torch.Tensor:
        """A view of one tensor."""
        return self.flat[slot.start_idx : slot.end_idx].view(slot.dtype).reshape(slot.shape)


def make_buckets(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Fill buckets up to bucket_bytes; a single larger tensor has a bucket of its own."""
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        needed = _aligned(tensor.nbytes)
        if held and size + needed > bucket_bytes:
            yield _flatten(held, size)
            held, size = [], 0
        held.append((name, tensor.detach()))
        size += needed
    if held:
        yield _flatten(held, size)


def _flatten(tensors: list[tuple[str, torch.Tensor]], size: int) -> Bucket:
    flat = torch.zeros(size, dtype=torch.uint8, device=tensors[0][1].device)
    slots = []
    at = 0
    for name, tensor in tensors:
        flat[at : at + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
        slots.append(
            TensorSlot(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=at,
                end_idx=at + tensor.nbytes,
                numel=tensor.nbytes,
            )
        )
        at += _aligned(tensor.nbytes)
    return Bucket(flat=flat, slots=tuple(slots))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
