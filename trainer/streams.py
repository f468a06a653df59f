"""What a policy loss sees: streams over the scored tokens of one microbatch.

In the flow: forward.py makes one for each microbatch, loss.py masks it, token_loss.py reads it. A loss by path gets the same.
"""

from dataclasses import dataclass

from torch import Tensor


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
    fresh: Tensor | None = None  # bool: sampled by the version that the learner holds; None: not known
