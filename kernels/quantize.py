"""Block-quantised float8 weights: what checkpoints with `quant_method: fp8` and a `weight_block_size` hold.

A matrix [N, K] is cut into blocks of rows x columns, the last ones smaller; each block is stored as float8 (e4m3fn) beside one f32 factor:
weight = stored * scale_inv of its block (DeepSeek-V3, arXiv:2412.19437, 3.3). In plain torch, on any device.
Invariant: dequantize_blocks(*quantize_blocks(w)) differs from w by at most 1/16 of |w| where that is at least 2**-6 of the scale, and by
at most 2**-10 of the scale below: half a step of e4m3's three bits of mantissa, and of its subnormal numbers.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

FLOAT8: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(FLOAT8).max  # 448

Block = tuple[int, int]


def num_blocks(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, int]:
    """Rows and columns of the factors of a matrix of this shape."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def quantize_blocks(weight: Float[Tensor, "n k"], block: Block) -> tuple[Float[Tensor, "n k"], Float[Tensor, "r c"]]:
    """(float8 [N, K], factors f32): each block's largest magnitude becomes float8's largest. A block of zeros has the factor 1."""
    r, c = num_blocks(weight.shape, block)
    whole = weight.new_zeros((r * block[0], c * block[1]), dtype=torch.float32)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    blocks = whole.view(r, block[0], c, block[1])
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, _LARGEST / largest, torch.ones_like(largest))
    stored = (blocks * scale[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(FLOAT8)
    return stored.view(whole.shape)[: weight.shape[0], : weight.shape[1]].contiguous(), 1.0 / scale


def dequantize_blocks(
    stored: Float[Tensor, "n k"], scale_inv: Float[Tensor, "r c"], block: Block
) -> Float[Tensor, "n k"]:
    """The weights [N, K] in f32 that stored ones stand for."""
    rows = torch.arange(stored.shape[0], device=stored.device) // block[0]
    columns = torch.arange(stored.shape[1], device=stored.device) // block[1]
    return stored.float() * scale_inv.float()[rows][:, columns]
