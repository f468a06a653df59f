"""Row statistics of logits in plain torch: the reference of the Triton kernels and the implementation on a CPU.

Rows are tokens; z are logits already divided by the temperature. With a vocabulary that is sharded over ranks, the three sums of
`Partial` are combined over them before `finish`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor


@dataclass(slots=True)
class Partial:
    """Of one vocabulary shard, for each row: max z; sum exp(z - max); sum exp(z - max) z; target z (0 if not in the shard)."""

    maximum: Float32[Tensor, " c"]
    sum_exp: Float32[Tensor, " c"]
    sum_exp_z: Float32[Tensor, " c"]
    target: Float32[Tensor, " c"]


def partial_rows(z: Float32[Tensor, "c v"], target: Int64[Tensor, " c"]) -> Partial:
    """Statistics of z. target is an index into this shard, or negative when it lies elsewhere."""
    if not z.shape[1]:  # a shard of padding only
        zero = z.new_zeros(len(z))
        return Partial(torch.full_like(zero, -torch.inf), zero, zero, zero)
    maximum = z.amax(-1)
    weights = (z - maximum.unsqueeze(1)).exp_()
    sum_exp = weights.sum(-1)
    sum_exp_z = torch.linalg.vecdot(weights, z)
    here = target >= 0
    chosen = z.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    return Partial(maximum, sum_exp, sum_exp_z, torch.where(here, chosen, torch.zeros_like(chosen)))


def gradient_rows_(
    z: Float32[Tensor, "c v"], target: Int64[Tensor, " c"], lse: Float32[Tensor, " c"], entropy: Float32[Tensor, " c"],
    grad_logprob: Float32[Tensor, " c"], grad_entropy: Float32[Tensor, " c"] | None,
) -> Float32[Tensor, "c v"]:  # fmt: skip
    """Overwrite z with dz: p = exp(z - lse); dz = g_lp (onehot - p) - g_H p (log p + H)."""
    logp = z.sub_(lse.unsqueeze(1))
    p = logp.exp()
    if grad_entropy is None:
        dz = p.mul_(-grad_logprob.unsqueeze(1))
    else:
        slope = logp.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
        dz = p.mul_(-(slope + grad_logprob.unsqueeze(1)))
    if not z.shape[1]:
        return dz
    here = target >= 0
    dz.scatter_add_(1, target.clamp(min=0).unsqueeze(1), torch.where(here, grad_logprob, 0.0).unsqueeze(1))
    return dz
