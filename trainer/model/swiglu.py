"""The gate of every MLP of the local spec: silu(gate) * up, gate and up being the halves of what fc1 gave.

SwiGLU, arXiv 2002.05202, eq. 6. On a CPU its element-wise work is bound by memory: it is done in blocks of rows that stay in a core's
cache, and the gradients of both halves are written where fc1 wants them. Invariant: bit for bit what the plain expression gives.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

BLOCK_BYTES: Final = 512 * 1024  # of fc1's output, half of a small second-level cache


class _CpuSwiGlu(torch.autograd.Function):
    """x [..., 2 f] -> silu(x[..., :f]) * x[..., f:]; keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        for block, kept in zip(_blocks(x), _blocks(out, like=x), strict=True):
            gate, up = block.chunk(2, dim=-1)
            torch.mul(silu(gate), up, out=kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = zip(_blocks(x), _blocks(grads[0].contiguous(), like=x), _blocks(grad_x, like=x), strict=True)
        for block, grad, found in parts:
            gate, up = block.chunk(2, dim=-1)
            grad_gate, grad_up = found.chunk(2, dim=-1)
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
            torch.mul(grad, silu(gate), out=grad_up)
        return grad_x


def _blocks(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows of x [..., n] in blocks, as many as those of `like`."""
    like = x if like is None else like
    rows = max(1, BLOCK_BYTES // (like.shape[-1] * like.element_size()))
    found: tuple[Tensor, ...] = x.reshape(-1, x.shape[-1]).split(rows)
    return found


def swiglu(x: Float[Tensor, "*t two_f"]) -> Float[Tensor, "*t two_f//2"]:
    """silu(gate) * up of x = (gate, up)."""
    if x.is_cuda:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up
    out: Tensor = _CpuSwiGlu.apply(x)  # type: ignore[no-untyped-call]
    return out


class SwiGlu(nn.Module):
    """`swiglu` as megatron-core builds the activation of its MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        del config

    def forward(self, x: Float[Tensor, "*t two_f"]) -> Float[Tensor, "*t two_f//2"]:
        """Of fc1's output."""
        return swiglu(x)
