"""The objective of a microbatch: a policy loss of `token_loss.py`, corrected, with KL and entropy; streams in, one number out.

In the flow: the learner minimises `policy_loss` of each microbatch; aggregation is folded into `weight` already, so they sum.
Invariant: what stands under the mask (NaN included) touches neither the value nor any gradient.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.loading import load_function
from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.correction import correction
from rlagent.trainer.kl import KL_ESTIMATORS
from rlagent.trainer.streams import LossInput, PerToken, TokenMask
from rlagent.trainer.token_loss import TOKEN_LOSSES, TokenLoss, bounded_exp

Backend = Literal["auto", "torch", "triton"]
FUSED: Final = ("ppo", "decoupled_ppo", "cispo", "reinforce", "opd", "dpo")
"""The losses that rlagent.kernels.policy_loss_triton knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """loss: sum over tokens of weight * per-token loss. stats: sums over masked-in tokens; "max:" keys are maxima."""

    loss: Float[Tensor, ""]
    stats: dict[str, Tensor]


def token_loss(name: str) -> TokenLoss:
    """That of a name, or by file.py:function. LoadError when there is none there."""
    return TOKEN_LOSSES.get(name) or load_function(name, what="learner.loss.name")


def policy_loss(
    streams: LossInput, config: LossConfig, correction_config: CorrectionConfig, backend: Backend = "auto"
) -> LossOutput:
    """Policy loss + KL + entropy bonus over one microbatch, and the statistics of learner metrics.

    `config.name` is one of TOKEN_LOSSES or file.py:function of the type TokenLoss. On a GPU the losses that the Triton kernel knows go
    through it; everything else, and every CPU, through plain torch.
    """
    if backend == "triton" or (backend == "auto" and streams.logprobs.is_cuda and config.name in FUSED):
        return _fused(streams, config, correction_config)
    s = _masked(streams)
    per_token = token_loss(config.name)(s, config)
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
        if config.kl_in == "loss":
            per_token = per_token + config.kl_coef * divergence
        stats["kl_reference"] = divergence.detach().sum()
    if s.entropy is not None:
        if config.entropy_coef:
            per_token = per_token - config.entropy_coef * s.entropy
        stats["entropy"] = s.entropy.detach().sum()
    loss = torch.where(s.loss_mask, s.weight * per_token, torch.zeros_like(per_token)).sum()
    stats["loss"] = loss.detach()
    return LossOutput(loss=loss, stats=stats)


def _fused(s: LossInput, config: LossConfig, correction_config: CorrectionConfig) -> LossOutput:
    """The same through the Triton kernel: one pass over the streams. A correction's factor is made before it, by torch."""
    from rlagent.kernels import policy_loss_triton

    factor = rejected = None
    if correction_config.name != "none" or correction_config.veto is not None or config.name == "decoupled_ppo":
        log_w = torch.where(s.loss_mask, s.old_logprobs.detach() - s.rollout_logprobs, 0.0)
        factor = correction(log_w, s.loss_mask, s.sequence_index.long(), correction_config)
        if factor is not None:
            rejected = ((factor == 0) & s.loss_mask).sum()
        if config.name == "decoupled_ppo":
            factor = bounded_exp(log_w) * (1.0 if factor is None else factor)
    has_kl = s.ref_logprobs is not None and config.kl_coef > 0
    loss, stats = policy_loss_triton.policy_loss(
        name=config.name,
        logprobs=s.logprobs,
        old_logprobs=s.old_logprobs,
        rollout_logprobs=s.rollout_logprobs,
        advantages=s.advantages,
        weight=s.weight,
        mask=s.loss_mask,
        factor=factor,
        ref_logprobs=s.ref_logprobs if has_kl else None,
        entropy=s.entropy,
        fresh=s.fresh,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        kl=config.kl_estimator if has_kl else "none",
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        entropy_coef=config.entropy_coef,
    )
    return LossOutput(loss=loss, stats=stats if rejected is None else {**stats, "correction_rejected": rejected})


def _masked(s: LossInput) -> LossInput:
    """The streams with 0 where nothing was sampled, before any arithmetic: where() cuts the gradient exactly."""

    def put(values: PerToken) -> PerToken:
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
        fresh=None if s.fresh is None else s.fresh & s.loss_mask,
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
        **_mismatch(gap, w, mask, ""),
        **({} if s.fresh is None else _mismatch(gap, w, s.fresh, "fresh_")),
    }


def _mismatch(gap: PerToken, w: PerToken, mask: TokenMask, prefix: str) -> dict[str, Tensor]:
    """Sums over the tokens of `mask` of what tells the engine's logprobs from the learner's."""
    gap, w = torch.where(mask, gap, torch.zeros_like(gap)), torch.where(mask, w, torch.zeros_like(w))
    found = {
        "mismatch_kl": gap.sum(),
        "mismatch_k3": ((-gap).exp() - 1 + gap).sum(),
        "mismatch_abs": gap.abs().sum(),
        "mismatch_exp_abs": torch.where(mask, gap.abs().exp(), torch.zeros_like(gap)).sum(),
        "w": w.sum(),
        "w_squared": w.square().sum(),
    }
    named = {f"{prefix}{name}": value for name, value in found.items()}
    if prefix:
        named[f"{prefix}count"] = mask.sum()
    return named | {f"max:{prefix}mismatch_abs": gap.abs().max()}
