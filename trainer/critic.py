"""The value model of gae: the policy's architecture with a scalar head, trained beside the policy by its own optimizer.

In the flow: learner.py asks it for values before a step's updates, and gives it the returns to learn in each of them.
V of a token is that of the state before it: from the hidden state that also scores the token. The head begins at 0, the rest at the
policy's weights; the policy's output matrix is carried along where it is not tied, unused. Invariant: objectives are sums over
tokens with the policy's weights, so no layout or split changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from rlagent.trainer import weights
from rlagent.trainer.config import LearnerConfig
from rlagent.trainer.forward import Stats, backward, score_all, sum_gradients, value
from rlagent.trainer.microbatch import Microbatch
from rlagent.trainer.model.architecture import Architecture
from rlagent.trainer.model.build import Policy, PolicyModel, chunks_of
from rlagent.trainer.optimizer import DataParallel, PolicyOptimizer
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.streams import PerToken
from rlagent.trainer.weight_map import Rule, renamed

# How its tensors are called in a checkpoint, beside the policy's.
PREFIX: Final = "critic."
_HEAD: Final = Rule(local=("value_head",), hf=(f"{PREFIX}value_head",), kind="replicated", place="norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueWork:
    """A microbatch with what its values are to become."""

    microbatch: Microbatch
    old_values: PerToken
    returns: PerToken


def value_loss(values: PerToken, work: ValueWork, clip: float) -> tuple[Float[Tensor, ""], Stats]:
    """Sum of weight * max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2 (PPO2's clipped value loss), and statistics."""
    s = work.microbatch.streams
    mask = s.loss_mask
    values, old, returns = (torch.where(mask, x, 0.0) for x in (values, work.old_values, work.returns))
    clipped = old + (values - old).clamp(-clip, clip)
    plain = (values - returns).square()
    each = torch.maximum(plain, (clipped - returns).square()) / 2
    loss = torch.where(mask, s.weight * each, 0.0).sum()
    stats = {
        "value_loss": loss,
        "value_squared_error": plain.sum(),
        "value_sum": values.sum(),
        "return_sum": returns.sum(),
        "return_square": returns.square().sum(),
        "value_clipped": (mask & ((values - old).abs() > clip)).sum(),
    }
    return loss, {name: number.detach() for name, number in stats.items()}


class Critic:
    """One per rank; every method is called on all ranks in the same order."""

    def __init__(self, config: LearnerConfig, model: Policy, arch: Architecture, plan: ParallelPlan) -> None:
        """model: a policy's, with the policy's weights; it becomes this critic's."""
        self.config = config.critic
        self.arch, self.plan = arch, plan
        if plan.is_last_stage:
            chunks_of(model)[-1].value_head = torch.nn.Parameter(
                torch.zeros(arch.hidden_size, dtype=getattr(torch, config.dtype), device=plan.device)
            )
        model.config.finalize_model_grads_func = sum_gradients
        self.model = DataParallel(model, distributed=plan.config.distributed_optimizer)
        own = config.optimizer.model_copy(update={"lr": config.critic.lr, "min_lr": 0.0})
        self.optimizer = PolicyOptimizer(own, self.model, dtype=getattr(torch, config.dtype))

    def values(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """V [S] of each microbatch on the last stage; an empty list on the others."""
        return score_all(self.model, microbatches, self.plan, value)

    def update(self, works: Sequence[ValueWork], rate: float) -> tuple[list[Stats], float]:
        """One update; statistics and the gradient's norm."""

        def objective(model: PolicyModel, hidden: Tensor, work: ValueWork) -> tuple[Tensor, Stats]:
            return value_loss(value(model, hidden, work.microbatch, self.plan), work, self.config.clip)

        self.optimizer.zero_grad()
        stats = backward(self.model, works, objective)
        return stats, self.optimizer.step(rate)

    def parameters(self) -> dict[Rule, Tensor]:
        """This rank's parameters by what they are, under names of their own."""
        local = weights.local_parameters(self.model.module, self.arch, self.plan)
        found = {renamed(rule, PREFIX): parameter for rule, parameter in local.items()}
        if self.plan.is_last_stage:
            found[_HEAD] = chunks_of(self.model.module)[-1].value_head
        return found

    def metrics(self, totals: dict[str, Any], count: int) -> dict[str, float]:
        """A step's value/* from the sums over its tokens."""
        n = max(1, count)
        mean = float(totals.get("return_sum", 0)) / n
        variance = float(totals.get("return_square", 0)) / n - mean**2
        error = float(totals.get("value_squared_error", 0)) / n
        return {
            "value/loss": float(totals.get("value_loss", 0)),
            "value/mean": float(totals.get("value_sum", 0)) / n,
            "value/return_mean": mean,
            "value/squared_error": error,
            "value/explained_variance": 1 - error / variance if variance > 0 else 0.0,
            "value/clipped": float(totals.get("value_clipped", 0)) / n,
        }
