"""The row kernels of linear_logprob in Triton: one program a row, over tiles of the vocabulary.

Same rows in and out as rlagent.kernels.reference. The matrix products around them stay with cuBLAS: the head is compute-bound, and
fusing it would only save memory that chunking saves already. Everything is fp32: the logits of a chunk are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlagent.kernels.reference import Partial

BLOCK = 4096  # columns a tile: 16 KiB of fp32, a few tiles for a vocabulary of 150k


@triton.jit
def partial_kernel(
    z_ptr, target_ptr, maximum_ptr, sum_exp_ptr, sum_exp_z_ptr, chosen_ptr, num_columns, stride, BLOCK: tl.constexpr
):
    """Online max, sum exp and sum exp * z of one row; the target's z."""
    row = tl.program_id(0)
    base = z_ptr + row.to(tl.int64) * stride
    maximum = -float("inf")
    sum_exp = 0.0
    sum_exp_z = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < num_columns, other=-float("inf"))
        tile_maximum = tl.maximum(maximum, tl.max(z, 0))
        # A row whose columns are all padding so far has maximum -inf: no exponent is taken of -inf - -inf.
        safe = tl.where(tile_maximum == -float("inf"), 0.0, tile_maximum)
        weights = tl.exp(z - safe)
        rescale = tl.exp(maximum - safe)
        finite_z = tl.where(z == -float("inf"), 0.0, z)
        sum_exp = sum_exp * rescale + tl.sum(weights, 0)
        sum_exp_z = sum_exp_z * rescale + tl.sum(weights * finite_z, 0)
        maximum = tile_maximum
    target = tl.load(target_ptr + row)
    chosen = tl.load(base + target, mask=target >= 0, other=0.0)
    tl.store(maximum_ptr + row, maximum)
    tl.store(sum_exp_ptr + row, sum_exp)
    tl.store(sum_exp_z_ptr + row, sum_exp_z)
    tl.store(chosen_ptr + row, chosen)


@triton.jit
def gradient_kernel(
    z_ptr,
    target_ptr,
    lse_ptr,
    entropy_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    num_columns,
    stride,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite one tile of a row of z with its gradient."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    at = z_ptr + row.to(tl.int64) * stride + columns
    z = tl.load(at, mask=inside, other=-float("inf"))
    logp = z - tl.load(lse_ptr + row)
    p = tl.exp(logp)
    grad = tl.load(grad_logprob_ptr + row)
    dz = -grad * p
    if HAS_ENTROPY:
        finite = tl.where(z == -float("inf"), 0.0, logp)
        dz -= tl.load(grad_entropy_ptr + row) * p * (finite + tl.load(entropy_ptr + row))
    dz += tl.where(columns == tl.load(target_ptr + row), grad, 0.0)
    tl.store(at, dz, mask=inside)


def partial_rows(z: Tensor, target: Tensor, block: int = BLOCK) -> Partial:
    """As rlagent.kernels.reference.partial_rows."""
    rows, columns = z.shape
    found = [torch.empty(rows, dtype=torch.float32, device=z.device) for _ in range(4)]
    if rows:
        partial_kernel[(rows,)](z, target, *found, columns, z.stride(0), BLOCK=block)
    return Partial(*found)


def gradient_rows_(
    z: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    block: int = BLOCK,
) -> Tensor:
    """As rlagent.kernels.reference.gradient_rows_; in place."""
    rows, columns = z.shape
    if rows:
        gradient_kernel[(rows, triton.cdiv(columns, block))](
            z, target, lse, entropy, grad_logprob.contiguous(),
            grad_logprob if grad_entropy is None else grad_entropy.contiguous(),
            columns, z.stride(0), HAS_ENTROPY=grad_entropy is not None, BLOCK=block,
        )  # fmt: skip
    return z
