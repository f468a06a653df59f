"""gae_packed in Triton: one program a row, tiles of tokens from the row's end to its start, a reverse scan inside a tile.

Each token is the map (A, V) -> (A', V') of what comes after it: a sampled one gives A' = r + gamma V - v + gamma lam A, V' = v; an
observed one passes both through. The maps are affine, so that they compose in any grouping: what `associative_scan` needs.
A' = a + b A + c V and V' = d + e V, with e = 0 or 1. fp32 throughout; one read of each stream, one write of each answer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens a tile


@triton.jit
def compose(a1, b1, c1, d1, e1, a2, b2, c2, d2, e2):
    """The map 2 after the map 1."""
    return a2 + b2 * a1 + c2 * d1, b2 * b1, b2 * c1 + c2 * e1, d2 + e2 * d1, e2 * e1


@triton.jit
def gae_kernel(reward_ptr, value_ptr, mask_ptr, bounds_ptr, advantage_ptr, return_ptr, gamma, lam, BLOCK: tl.constexpr):
    """One row, last tile first."""
    row = tl.program_id(0)
    start = tl.load(bounds_ptr + row)
    end = tl.load(bounds_ptr + row + 1)
    ahead = 0.0
    value_ahead = 0.0
    for done in range(0, end - start, BLOCK):
        # Position 0 of the tile is the row's last token that is left.
        at = end - 1 - done - tl.arange(0, BLOCK)
        inside = at >= start
        sampled = (tl.load(mask_ptr + at, mask=inside, other=0) != 0) & inside
        r = tl.where(sampled, tl.load(reward_ptr + at, mask=inside, other=0.0), 0.0)
        v = tl.where(sampled, tl.load(value_ptr + at, mask=inside, other=0.0), 0.0)
        a = tl.where(sampled, r - v, 0.0)
        b = tl.where(sampled, gamma * lam, 1.0)
        c = tl.where(sampled, gamma, 0.0)
        e = tl.where(sampled, 0.0, 1.0)
        a, b, c, d, e = tl.associative_scan((a, b, c, v, e), 0, compose)
        advantage = a + b * ahead + c * value_ahead
        tl.store(advantage_ptr + at, tl.where(sampled, advantage, 0.0), mask=inside)
        tl.store(return_ptr + at, tl.where(sampled, advantage + v, 0.0), mask=inside)
        last = tl.arange(0, BLOCK) == BLOCK - 1
        value_next = tl.sum(tl.where(last, d + e * value_ahead, 0.0), 0)
        ahead = tl.sum(tl.where(last, advantage, 0.0), 0)
        value_ahead = value_next


def gae_packed(
    reward: Tensor, value: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """As rlagent.kernels.gae.reference."""
    reward, value = reward.float().contiguous(), value.float().contiguous()
    advantage, returns = torch.zeros_like(reward), torch.zeros_like(reward)
    rows = len(cu_seqlens) - 1
    if rows:
        gae_kernel[(rows,)](
            reward,
            value,
            mask.to(torch.int8).contiguous(),
            cu_seqlens.int(),
            advantage,
            returns,
            gamma,
            lam,
            BLOCK=block,
        )
    return advantage, returns
