"""Policy losses: per-token streams in, one number out. Minimised.

In the flow: the learner calls `policy_loss` once a microbatch; aggregation is folded into `weight` already, so microbatches sum.
Invariant: what stands under the mask (NaN included) touches neither the value nor any gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.loading import load_function
from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.correction import correction
from rlagent.trainer.kl import KL_ESTIMATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """Per-token streams of a microbatch, all [T]. Gradients flow through logprobs and entropy only."""

    logprobs: Tensor
    old_logprobs: Tensor  # the proximal policy's
    rollout_logprobs: Tensor  # the engine's
    ref_logprobs: Tensor | None
    entropy: Tensor | None
    advantages: Tensor
    weight: Tensor
    loss_mask: Tensor  # bool
    sequence_index: Tensor  # int64; equal on the tokens of one row, which no microbatch cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """loss: scalar, sum over tokens of weight * per-token loss. stats: sums over masked-in tokens; "max:" keys are maxima."""

    loss: Tensor
    stats: dict[str, Tensor]


# exp of more overflows fp32, and 0 * inf is NaN; a token that far off is clipped, or rejected, anyway.
_MAX_LOG_RATIO: Final = 60.0
# (streams with the mask applied, config) -> per-token loss [T]
TokenLoss = Callable[[LossInput, LossConfig], Tensor]


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def ppo(s: LossInput, config: LossConfig) -> Tensor:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476, eq. 10).

    Dual clip, for A < 0: at most -c A (arXiv 1912.09729, eq. 5).
    """
    ratio = _exp(s.logprobs - s.old_logprobs)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-s.advantages * ratio, -s.advantages * clipped)
    if config.dual_clip is None:
        return loss
    return torch.where(s.advantages < 0, torch.minimum(loss, -config.dual_clip * s.advantages), loss)


def cispo(s: LossInput, config: LossConfig) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A lp (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    ratio = _exp(s.logprobs - s.old_logprobs).clamp(1 - config.clip_low, 1 + config.clip_high)
    return -ratio.detach() * s.advantages * s.logprobs


def gspo(s: LossInput, config: LossConfig) -> Tensor:
    """PPO's clip on the sequence's geometric mean ratio, in token form s exp(lp - sg lp) (GSPO, arXiv 2507.18071, eq. 14)."""
    size = int(s.sequence_index.max()) + 1
    log_ratio = s.logprobs.detach() - s.old_logprobs
    total = log_ratio.new_zeros(size).index_add(0, s.sequence_index, log_ratio)
    count = log_ratio.new_zeros(size).index_add(0, s.sequence_index, s.loss_mask.to(log_ratio.dtype)).clamp(min=1)
    ratio = _exp(total / count)[s.sequence_index] * (s.logprobs - s.logprobs.detach()).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return torch.maximum(-s.advantages * ratio, -s.advantages * clipped)


def reinforce(s: LossInput, config: LossConfig) -> Tensor:
    """-A lp (Williams 1992, eq. 11)."""
    del config
    return -s.advantages * s.logprobs


LOSSES: Final[Mapping[str, TokenLoss]] = {"ppo": ppo, "cispo": cispo, "gspo": gspo, "reinforce": reinforce}


def policy_loss(streams: LossInput, config: LossConfig, correction_config: CorrectionConfig) -> LossOutput:
    """Policy loss + KL + entropy bonus over one microbatch, and the statistics of learner metrics.

    `config.name` is one of LOSSES or file.py:function of the type TokenLoss.
    """
    token_loss = LOSSES.get(config.name) or load_function(
        config.name, what=f"loss (known by name: {', '.join(sorted(LOSSES))}; else file.py:function)"
    )
    s = _masked(streams)
    per_token = token_loss(s, config)
    if per_token.shape != s.logprobs.shape:
        raise LearnerError(f"loss {config.name!r} gave shape {tuple(per_token.shape)}, not {tuple(s.logprobs.shape)}")
    log_w = s.old_logprobs - s.rollout_logprobs
    factor = correction(log_w, s.loss_mask, s.sequence_index, correction_config)
    if factor is not None:
        per_token = per_token * factor
    stats = _stats(s, config)
    if factor is not None:
        stats["correction_rejected"] = ((factor == 0) & s.loss_mask).sum()
    if s.ref_logprobs is not None and config.kl_coef:
        divergence = KL_ESTIMATORS[config.kl_estimator](s.ref_logprobs - s.logprobs)
        per_token = per_token + config.kl_coef * divergence
        stats["kl_reference"] = divergence.detach().sum()
    if s.entropy is not None:
        if config.entropy_coef:
            per_token = per_token - config.entropy_coef * s.entropy
        stats["entropy"] = s.entropy.detach().sum()
    loss = torch.where(s.loss_mask, s.weight * per_token, torch.zeros_like(per_token)).sum()
    stats["loss"] = loss.detach()
    return LossOutput(loss=loss, stats=stats)


def _masked(s: LossInput) -> LossInput:
    """The streams with 0 where nothing was sampled, before any arithmetic: where() cuts the gradient exactly."""

    def put(values: Tensor) -> Tensor:
        return torch.where(s.loss_mask, values, torch.zeros_like(values))

    return LossInput(
        logprobs=put(s.logprobs),
        old_logprobs=put(s.old_logprobs.detach()),
        rollout_logprobs=put(s.rollout_logprobs.detach()),
        ref_logprobs=None if s.ref_logprobs is None else put(s.ref_logprobs.detach()),
        entropy=None if s.entropy is None else put(s.entropy),
        advantages=put(s.advantages),
        weight=put(s.weight),
        loss_mask=s.loss_mask,
        sequence_index=s.sequence_index.long(),
    )


@torch.no_grad()
def _stats(s: LossInput, config: LossConfig) -> dict[str, Tensor]:
    """Sums over masked-in tokens (all streams are 0 elsewhere), and maxima, for trainer.metrics.reduce."""
    mask = s.loss_mask
    log_ratio = s.logprobs - s.old_logprobs
    ratio = torch.where(mask, log_ratio.exp(), torch.zeros_like(log_ratio))
    gap = s.rollout_logprobs - s.old_logprobs
    w = torch.where(mask, (-gap).exp(), torch.zeros_like(gap))
    return {
        "ratio": ratio.sum(),
        "max:ratio": ratio.max(),
        "approx_kl": (log_ratio.exp() - 1 - log_ratio).sum(),
        "clip_low": (mask & (s.advantages < 0) & (ratio < 1 - config.clip_low)).sum(),
        "clip_high": (mask & (s.advantages > 0) & (ratio > 1 + config.clip_high)).sum(),
        "mismatch_kl": gap.sum(),
        "mismatch_k3": ((-gap).exp() - 1 + gap).sum(),
        "mismatch_abs": gap.abs().sum(),
        "mismatch_exp_abs": torch.where(mask, gap.abs().exp(), torch.zeros_like(gap)).sum(),
        "max:mismatch_abs": gap.abs().max(),
        "w": w.sum(),
        "w_squared": w.square().sum(),
    }
