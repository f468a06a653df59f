"""What a policy loss sees: streams over the scored tokens of one microbatch.

In the flow: forward.py makes one for each microbatch, loss.py masks it, token_loss.py reads it. A loss by path gets the same.
Shapes in signatures are jaxtyping's, checked in the test run (tests/support/checked_shapes.py).
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor

# One number for each scored token of the microbatch.
PerToken = Float[Tensor, " t"]
TokenMask = Bool[Tensor, " t"]
TokenIndex = Int64[Tensor, " t"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """Per-token streams of a microbatch. Gradients flow through logprobs and entropy only."""

    logprobs: PerToken
    old_logprobs: PerToken  # the proximal policy's
    rollout_logprobs: PerToken  # the engine's
    ref_logprobs: PerToken | None
    entropy: PerToken | None
    advantages: PerToken
    weight: PerToken
    loss_mask: TokenMask
    sequence_index: TokenIndex  # equal on the tokens of one row, which no microbatch cuts
    fresh: TokenMask | None = None  # sampled by the version that the learner holds; None: not known
