"""Policy losses by token, each a small function of the streams. Minimised.

In the flow: loss.py picks one by learner.loss.name. Streams are 0 outside the mask; what a function gives there is thrown away.
Each has, at ratio 1, the gradient of REINFORCE (but for decoupled_ppo, which has the correction's factor, and sft).
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from rlagent.trainer.config import LossConfig
from rlagent.trainer.streams import LossInput, PerToken

# exp of more overflows fp32, and 0 * inf is NaN; a token that far off is clipped, or rejected, anyway.
_MAX_LOG_RATIO: Final = 60.0
# (streams with the mask applied, config) -> per-token loss
TokenLoss = Callable[[LossInput, LossConfig], PerToken]


def bounded_exp(log_ratio: PerToken) -> PerToken:
    """exp, of at most _MAX_LOG_RATIO either way."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _sequence_sum(values: PerToken, s: LossInput) -> PerToken:
    """Of each token, the sum over its row's sampled tokens."""
    size = int(s.sequence_index.max()) + 1
    return values.new_zeros(size).index_add(0, s.sequence_index, values)[s.sequence_index]


def _sequence_mean(values: PerToken, s: LossInput) -> PerToken:
    """Of each token, the mean over its row's sampled tokens."""
    return _sequence_sum(values, s) / _sequence_sum(s.loss_mask.to(values.dtype), s).clamp(min=1)


def ppo(s: LossInput, config: LossConfig) -> PerToken:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476, sec. 3.1).

    Dual clip, for A < 0: at most -c A (arXiv 1912.09729).
    """
    ratio = bounded_exp(s.logprobs - s.old_logprobs)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-s.advantages * ratio, -s.advantages * clipped)
    if config.dual_clip is None:
        return loss
    return torch.where(s.advantages < 0, torch.minimum(loss, -config.dual_clip * s.advantages), loss)


def cispo(s: LossInput, config: LossConfig) -> PerToken:
    """-sg(clip(r, 1 - low, 1 + high)) A lp (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    ratio = bounded_exp(s.logprobs - s.old_logprobs).clamp(1 - config.clip_low, 1 + config.clip_high)
    return -ratio.detach() * s.advantages * s.logprobs


def gspo(s: LossInput, config: LossConfig) -> PerToken:
    """PPO's clip on the sequence's geometric mean ratio, in token form s exp(lp - sg lp) (GSPO, arXiv 2507.18071, eq. 7; GSPO-token)."""
    mean = _sequence_mean(s.logprobs.detach() - s.old_logprobs, s)
    ratio = bounded_exp(mean) * (s.logprobs - s.logprobs.detach()).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return torch.maximum(-s.advantages * ratio, -s.advantages * clipped)


def reinforce(s: LossInput, config: LossConfig) -> PerToken:
    """-A lp (REINFORCE, Williams 1992)."""
    del config
    return -s.advantages * s.logprobs


def decoupled_ppo(s: LossInput, config: LossConfig) -> PerToken:
    """PPO on the ratio to the proximal policy, times exp(lp_old - lp_roll) (AReaL's decoupled objective, arXiv 2505.24298)."""
    return ppo(s, config) * bounded_exp(s.old_logprobs - s.rollout_logprobs)


def gmpo(s: LossInput, config: LossConfig) -> PerToken:
    """-A times the geometric mean of the row's ratios, each clipped where that is pessimistic (GMPO, arXiv 2507.20673)."""
    log_ratio = s.logprobs - s.old_logprobs
    low, high = torch.tensor([1 - config.clip_low, 1 + config.clip_high], dtype=torch.float64).log().tolist()
    clipped = torch.where(s.advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    return -s.advantages * bounded_exp(_sequence_mean(torch.where(s.loss_mask, clipped, 0.0), s))


def sapo(s: LossInput, config: LossConfig) -> PerToken:
    """-A 4 / tau sigmoid(tau (r - 1)), a soft gate in place of the clip (SAPO, arXiv 2511.20347)."""
    tau = torch.where(s.advantages > 0, config.tau_positive, config.tau_negative)
    return -s.advantages * 4 / tau * torch.sigmoid(tau * (bounded_exp(s.logprobs - s.old_logprobs) - 1))


def topr(s: LossInput, config: LossConfig) -> PerToken:
    """-A sg(rho) lp; rho is 1 for A > 0, else the row's ratio, at most 1 (TOPR, arXiv 2503.14286)."""
    del config
    ratio = bounded_exp(_sequence_sum(s.logprobs.detach() - s.old_logprobs, s)).clamp(max=1)
    return -torch.where(s.advantages > 0, torch.ones_like(ratio), ratio) * s.advantages * s.logprobs


def sft(s: LossInput, config: LossConfig) -> PerToken:
    """-lp: cross entropy on the sampled tokens, whatever their reward."""
    del config
    return -s.logprobs


# Distillation and preference are REINFORCE on advantages that the learner computes from scores: `rlagent.trainer.credit`.
TOKEN_LOSSES: Final[Mapping[str, TokenLoss]] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "topr": topr,
    "reinforce": reinforce,
    "opd": reinforce,
    "sft": sft,
    "dpo": reinforce,
}
