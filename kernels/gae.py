"""gae_packed: generalised advantage estimates over packed rows of sampled and observed tokens.

Tokens that were not sampled carry V_next and A through: the answer is that of the rows with their observations deleted.
Plain torch is the reference and the CPU's implementation; on a GPU a Triton kernel scans one row a program.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float32, Int32
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]


def gae_packed(
    reward: Float32[Tensor, " n"],
    value: Float32[Tensor, " n"],
    mask: Bool[Tensor, " n"],
    cu_seqlens: Int32[Tensor, " rows_and_1"],
    gamma: float,
    lam: float,
    *,
    backend: Backend = "auto",
) -> tuple[Float32[Tensor, " n"], Float32[Tensor, " n"]]:
    """A_t = d_t + gamma lam A_next, d_t = r_t + gamma V_next - V_t, next the following sampled token of the row (arXiv 1506.02438, eq. 16).

    Returns (advantage, return = A + V), 0 outside the mask.
    """
    if backend == "triton" or (backend == "auto" and reward.is_cuda):
        from rlagent.kernels import gae_triton

        found: tuple[Tensor, Tensor] = gae_triton.gae_packed(reward, value, mask, cu_seqlens, gamma, lam)
        return found
    return reference(reward, value, mask, cu_seqlens, gamma, lam)


def reference(
    reward: Float32[Tensor, " n"], value: Float32[Tensor, " n"], mask: Bool[Tensor, " n"],
    cu_seqlens: Int32[Tensor, " rows_and_1"], gamma: float, lam: float,
) -> tuple[Float32[Tensor, " n"], Float32[Tensor, " n"]]:  # fmt: skip
    """All rows side by side, one step a sampled token of the longest."""
    places = torch.nonzero(mask).squeeze(1)
    row = torch.searchsorted(cu_seqlens.long(), places, right=True) - 1
    count = torch.bincount(row, minlength=len(cu_seqlens) - 1)
    first = torch.cumsum(count, 0) - count
    at = torch.arange(len(places), device=places.device) - first[row]
    shape = (len(count), int(count.max()) if len(places) else 0)
    r, v = reward.new_zeros(shape), reward.new_zeros(shape)
    r[row, at], v[row, at] = reward[places].float(), value[places].float()
    found = torch.zeros_like(r)
    ahead = v_next = reward.new_zeros(len(count))
    for step in range(shape[1] - 1, -1, -1):
        # Behind a row's end r, v and A are 0, so that its last token sees V_next = A_next = 0.
        here = step < count
        ahead = torch.where(here, r[:, step] + gamma * v_next - v[:, step] + gamma * lam * ahead, 0.0)
        v_next = v[:, step]
        found[:, step] = ahead
    advantage = torch.zeros_like(reward, dtype=torch.float32)
    advantage[places] = found[row, at]
    return advantage, torch.where(mask, advantage + value, 0.0)
