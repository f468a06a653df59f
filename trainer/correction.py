"""Corrections of the mismatch between the engine's policy and the learner's, on w = exp(lp_old - lp_roll).

Each gives a factor a token (detached) that multiplies the policy loss. A sequence is a row of the batch: its tokens share a
`sequence_index` and are all in one microbatch, so no split of the work changes a sequence's factor.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from rlagent.trainer.config import CorrectionConfig
from rlagent.trainer.streams import PerToken, TokenIndex, TokenMask

# (w, config) -> factor
Rule = Callable[[PerToken, CorrectionConfig], PerToken]


def tis(w: PerToken, config: CorrectionConfig) -> PerToken:
    """Truncated importance sampling: min(w, high) (Yao et al. 2025; Ionides 2008)."""
    return w.clamp(max=config.high)


def mis(w: PerToken, config: CorrectionConfig) -> PerToken:
    """Masked importance sampling, IcePop: w inside [low, high], 0 outside (arXiv 2510.18855)."""
    return torch.where((w >= config.low) & (w <= config.high), w, torch.zeros_like(w))


_RULES: Final[Mapping[str, Rule]] = {"tis": tis, "mis": mis, "icepop": mis}


def correction(
    log_w: PerToken, mask: TokenMask, sequence_index: TokenIndex, config: CorrectionConfig
) -> PerToken | None:
    """The factor, or None when nothing is corrected. log_w must be 0 outside the mask."""
    if config.name == "none" and config.veto is None:
        return None
    log_w = log_w.detach()
    factor = torch.ones_like(log_w)
    if config.name != "none":
        factor = _RULES[config.name](_level(log_w, mask, sequence_index, config.level).exp(), config)
    if config.veto is not None:
        lowest = torch.full((int(sequence_index.max()) + 1,), torch.inf, dtype=log_w.dtype, device=log_w.device)
        lowest = lowest.scatter_reduce(0, sequence_index, torch.where(mask, log_w, torch.inf), "amin")
        factor = torch.where(lowest[sequence_index].exp() < config.veto, torch.zeros_like(factor), factor)
    return factor


def _level(log_w: PerToken, mask: TokenMask, sequence_index: TokenIndex, level: str) -> PerToken:
    """log w of each token, of its sequence (sum), or its sequence's geometric mean."""
    if level == "token":
        return log_w
    size = int(sequence_index.max()) + 1
    total = torch.zeros(size, dtype=log_w.dtype, device=log_w.device).index_add(0, sequence_index, log_w)
    if level == "geometric":
        count = torch.zeros_like(total).index_add(0, sequence_index, mask.to(log_w.dtype))
        total = total / count.clamp(min=1)
    return total[sequence_index]
