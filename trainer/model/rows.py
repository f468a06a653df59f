"""Scatter and gather of whole rows, each the other's gradient. Gradients add up only in rows that were taken more than once, which
they are where rows of a microbatch share a prefix (shared_prefixes.py): all others are exact and the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows [t] stand in a stream of `size`: each at `first` [t], and rows `copied` [c] once more at `copies` [c]; all places
    differ.
    """

    first: Tensor
    copied: Tensor
    copies: Tensor
    size: int

    @staticmethod
    def of(place: Tensor, size: int, computed: Tensor | None = None, source: Tensor | None = None) -> Places:
        """place [T] of a stream's tokens. Where some are copies: which are not [T], and the row that each is of [T]."""
        if computed is None or source is None:
            nothing = place.new_empty(0)
            return Places(place, nothing, nothing, size)
        return Places(place[computed], source[~computed], place[~computed], size)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        out = x.new_zeros((places.size, *x.shape[1:]))
        out[places.first] = x
        if len(places.copies):
            out[places.copies] = x[places.copied]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        places = ctx.places
        grad = grads[0][places.first]
        if len(places.copies):
            grad.index_add_(0, places.copied, grads[0][places.copies])
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, repeated: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = x.shape[0]
        ctx.repeated = repeated
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        out = grads[0].new_zeros((ctx.size, *grads[0].shape[1:]))
        if ctx.repeated:
            return out.index_add_(0, index, grads[0]), None, None
        out[index] = grads[0]
        return out, None, None


def scatter_rows(x: Tensor, places: Places) -> Tensor:
    """x [t, ...] to its places in a zeroed [size, ...]."""
    out: Tensor = _Scatter.apply(x, places)  # type: ignore[no-untyped-call]
    return out


def gather_rows(x: Tensor, index: Tensor, *, repeated: bool = False) -> Tensor:
    """x [size, ...] -> its rows `index` [t]; repeated: they may not all be distinct."""
    out: Tensor = _Gather.apply(x, index, repeated)  # type: ignore[no-untyped-call]
    return out
