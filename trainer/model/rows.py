"""Scatter and gather of whole rows at distinct indices, each the other's gradient: no accumulation, so exact and the
same on every run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        out = x.new_zeros((size, *x.shape[1:]))
        out[index] = x
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grads[0][index], None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = x.shape[0]
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        out = grads[0].new_zeros((ctx.size, *grads[0].shape[1:]))
        out[index] = grads[0]
        return out, None


def scatter_rows(x: Tensor, index: Tensor, size: int) -> Tensor:
    """x [t, ...] to rows `index` [t], all distinct, of a zeroed [size, ...]."""
    out: Tensor = _Scatter.apply(x, index, size)  # type: ignore[no-untyped-call]
    return out


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [size, ...] -> its rows `index` [t], all distinct."""
    out: Tensor = _Gather.apply(x, index)  # type: ignore[no-untyped-call]
    return out
