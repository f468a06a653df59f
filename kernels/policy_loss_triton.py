"""policy_loss in Triton: one pass over the streams of a microbatch gives the loss, its gradients and every statistic.

The reference is rlagent.trainer.loss in plain torch, some sixty small kernels; same streams in, same numbers out. The loss is a sum of
functions of one token each, so the forward pass writes its gradients too, and the backward pass scales them. Sums go by block into
a [blocks, NUM_SUMS + NUM_MAXIMA] table that torch adds up: no atomics, so the same bits on every run. What stands under the mask, NaN
included, touches nothing. fp32 throughout.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 1024  # tokens a program
KINDS: Final = {"ppo": 0, "decoupled_ppo": 0, "cispo": 1, "reinforce": 2, "opd": 2, "dpo": 2}
"""The losses that it knows; decoupled_ppo is ppo with a factor."""
KL: Final = {"none": 0, "k1": 1, "k2": 2, "k3": 3, "k3_unbiased": 4}
SUMS: Final = (
    "loss", "ratio", "approx_kl", "clip_low", "clip_high", "mismatch_kl", "mismatch_k3", "mismatch_abs", "mismatch_exp_abs", "w",
    "w_squared", "fresh_mismatch_kl", "fresh_mismatch_k3", "fresh_mismatch_abs", "fresh_mismatch_exp_abs", "fresh_w",
    "fresh_w_squared", "fresh_count", "kl_reference", "entropy",
)  # fmt: skip
MAXIMA: Final = ("max:ratio", "max:mismatch_abs", "max:fresh_mismatch_abs")
_COLUMNS: Final = len(SUMS) + len(MAXIMA)


@triton.jit
def mismatch(table, at, gap, mask):
    """Sums over `mask` of what tells the engine's logprobs from the learner's, in six columns from `at`."""
    gap = tl.where(mask, gap, 0.0)
    w = tl.where(mask, tl.exp(-gap), 0.0)
    tl.store(table + at, tl.sum(gap, 0))
    tl.store(table + at + 1, tl.sum(tl.exp(-gap) - 1 + gap, 0))
    tl.store(table + at + 2, tl.sum(tl.abs(gap), 0))
    tl.store(table + at + 3, tl.sum(tl.where(mask, tl.exp(tl.abs(gap)), 0.0), 0))
    tl.store(table + at + 4, tl.sum(w, 0))
    tl.store(table + at + 5, tl.sum(w * w, 0))


@triton.jit
def surrogate(logprob, log_ratio, advantage, clip_low, clip_high, dual_clip, KIND: tl.constexpr, DUAL: tl.constexpr):
    """Each token's policy loss, and its derivative by the logprob."""
    # exp of more overflows fp32, and 0 * inf is NaN; the clamp's gradient is 0 outside it.
    safe = tl.exp(tl.minimum(tl.maximum(log_ratio, -60.0), 60.0))
    clipped = tl.minimum(tl.maximum(safe, 1 - clip_low), 1 + clip_high)
    if KIND == 0:
        slope = tl.where(tl.abs(log_ratio) <= 60.0, safe, 0.0)
        free, bound = -advantage * safe, -advantage * clipped
        loss = tl.maximum(free, bound)
        grad = tl.where(free >= bound, -advantage * slope, 0.0)
        if DUAL:
            cap = -dual_clip * advantage
            capped = (advantage < 0) & (loss > cap)
            loss = tl.where(capped, cap, loss)
            grad = tl.where(capped, 0.0, grad)
    elif KIND == 1:
        loss = -clipped * advantage * logprob
        grad = -clipped * advantage
    else:
        loss = -advantage * logprob
        grad = -advantage
    return loss, grad


@triton.jit
def reference_kl(d, mask, KL_KIND: tl.constexpr):
    """Each token's divergence from the reference, d of its logprob above the policy's, and the derivative by the policy's."""
    if KL_KIND == 1:
        divergence, pull = -d, tl.where(mask, 1.0, 0.0)
    elif KL_KIND == 2:
        divergence, pull = d * d / 2, -d
    else:
        divergence = tl.exp(d) - d - 1
        pull = 1 - tl.exp(d) if KL_KIND == 3 else -d
    return divergence, pull


@triton.jit
def policy_loss_kernel(
    logprob_ptr, old_ptr, rollout_ptr, advantage_ptr, weight_ptr, mask_ptr, factor_ptr, ref_ptr, entropy_ptr, fresh_ptr,
    grad_ptr, grad_entropy_ptr, table_ptr, num_tokens, clip_low, clip_high, dual_clip, kl_coef, entropy_coef,
    KIND: tl.constexpr, DUAL: tl.constexpr, KL_KIND: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_FRESH: tl.constexpr, NUM_SUMS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of tokens."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    mask = (tl.load(mask_ptr + at, mask=inside, other=0) != 0) & inside
    # A masked load reads nothing where the mask is 0.
    logprob = tl.load(logprob_ptr + at, mask=mask, other=0.0)
    old = tl.load(old_ptr + at, mask=mask, other=0.0)
    advantage = tl.load(advantage_ptr + at, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    table = table_ptr + block * COLUMNS

    log_ratio = logprob - old
    loss, grad = surrogate(logprob, log_ratio, advantage, clip_low, clip_high, dual_clip, KIND, DUAL)
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + at, mask=mask, other=0.0)
        loss, grad = loss * factor, grad * factor
    if KL_KIND > 0:
        d = tl.load(ref_ptr + at, mask=mask, other=0.0) - logprob
        divergence, pull = reference_kl(d, mask, KL_KIND)
        loss += kl_coef * divergence
        grad += kl_coef * pull
        tl.store(table + 18, tl.sum(divergence, 0))
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + at, mask=mask, other=0.0)
        loss -= entropy_coef * entropy
        tl.store(grad_entropy_ptr + at, -entropy_coef * weight, mask=inside)
        tl.store(table + 19, tl.sum(entropy, 0))
    tl.store(grad_ptr + at, tl.where(mask, grad * weight, 0.0), mask=inside)

    ratio = tl.where(mask, tl.exp(log_ratio), 0.0)
    tl.store(table, tl.sum(tl.where(mask, loss * weight, 0.0), 0))
    tl.store(table + 1, tl.sum(ratio, 0))
    tl.store(table + 2, tl.sum(tl.exp(log_ratio) - 1 - log_ratio, 0))
    tl.store(table + 3, tl.sum((mask & (advantage < 0) & (ratio < 1 - clip_low)).to(tl.float32), 0))
    tl.store(table + 4, tl.sum((mask & (advantage > 0) & (ratio > 1 + clip_high)).to(tl.float32), 0))
    tl.store(table + NUM_SUMS, tl.max(ratio, 0))
    gap = tl.load(rollout_ptr + at, mask=mask, other=0.0) - old
    mismatch(table, 5, gap, mask)
    tl.store(table + NUM_SUMS + 1, tl.max(tl.abs(gap), 0))
    if HAS_FRESH:
        fresh = (tl.load(fresh_ptr + at, mask=inside, other=0) != 0) & mask
        mismatch(table, 11, gap, fresh)
        tl.store(table + 17, tl.sum(fresh.to(tl.float32), 0))
        tl.store(table + NUM_SUMS + 2, tl.max(tl.where(fresh, tl.abs(gap), 0.0), 0))


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor | None,
        streams: dict[str, Tensor | None],
        numbers: dict[str, Any],
        block: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(logprobs)
        table = torch.zeros(triton.cdiv(count, block), _COLUMNS, dtype=torch.float32, device=logprobs.device)
        lp = logprobs.contiguous()
        grad = torch.empty_like(lp)
        grad_entropy = None if entropy is None else torch.empty_like(lp)
        given = {name: lp if stream is None else stream for name, stream in streams.items()}
        policy_loss_kernel[(len(table),)](
            lp, *(given[name] for name in ("old", "rollout", "advantages", "weight", "mask", "factor", "ref")),
            lp if entropy is None else entropy.contiguous(), given["fresh"], grad, grad if grad_entropy is None else grad_entropy,
            table, count, **numbers, HAS_FACTOR=streams["factor"] is not None, HAS_ENTROPY=entropy is not None,
            HAS_FRESH=streams["fresh"] is not None, NUM_SUMS=len(SUMS), COLUMNS=_COLUMNS, BLOCK=block,
        )  # fmt: skip
        ctx.save_for_backward(grad, grad_entropy)
        found = torch.cat((table[:, : len(SUMS)].sum(0), table[:, len(SUMS) :].amax(0)))
        ctx.mark_non_differentiable(found)
        return found[0].clone(), found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, grad_entropy = ctx.saved_tensors
        return grad * grads[0], None if grad_entropy is None else grad_entropy * grads[0], None, None, None


def policy_loss(
    *, name: str, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, weight: Tensor, mask: Tensor,
    factor: Tensor | None = None, ref_logprobs: Tensor | None = None, entropy: Tensor | None = None, fresh: Tensor | None = None,
    clip_low: float, clip_high: float, dual_clip: float | None = None, kl: str = "none", kl_coef: float = 0.0,
    entropy_coef: float = 0.0, block: int = BLOCK,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """(loss, a scalar; statistics by name): sum of weight * (factor * policy loss + kl_coef * KL - entropy_coef * entropy) over the mask.

    All streams [T], at least one token; mask and fresh bool, `factor` detached, the rest fp32. `name` is a key of KINDS, `kl` of
    KL. Gradients flow to logprobs and entropy alone.
    """
    streams = {
        "old": old_logprobs, "rollout": rollout_logprobs, "advantages": advantages, "weight": weight,
        "mask": mask.to(torch.int8), "factor": factor, "ref": ref_logprobs, "fresh": None if fresh is None else fresh.to(torch.int8),
    }  # fmt: skip
    numbers = {
        "clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip or 0.0, "kl_coef": kl_coef, "entropy_coef": entropy_coef,
        "KIND": KINDS[name], "DUAL": dual_clip is not None and KINDS[name] == 0, "KL_KIND": KL[kl],
    }  # fmt: skip
    plain = {key: None if stream is None else stream.detach().contiguous() for key, stream in streams.items()}
    loss, found = _PolicyLoss.apply(logprobs, entropy, plain, numbers, block)  # type: ignore[no-untyped-call]
    absent = set()
    if kl == "none":
        absent.add("kl_reference")
    if entropy is None:
        absent.add("entropy")
    named = dict(zip((*SUMS, *MAXIMA), found.unbind(), strict=True))
    if fresh is None:
        absent |= {key for key in named if "fresh_" in key}
    return loss, {key: value for key, value in named.items() if key not in absent}
