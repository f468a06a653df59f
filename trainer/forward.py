"""Runs microbatches through the model by megatron's pipeline schedules: scoring without gradients, and
forward-backward with the loss.

The head is applied here to the hidden states of scored tokens only, so that neither unscored logits nor a whole
batch's logits exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlagent.kernels.logprob import linear_logprob
from rlagent.trainer.config import LearnerConfig
from rlagent.trainer.loss import policy_loss
from rlagent.trainer.microbatch import IGNORED, Microbatch
from rlagent.trainer.model import megatron
from rlagent.trainer.model.build import PolicyModel, chunks_of
from rlagent.trainer.model.rows import gather_rows
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.streams import LossInput, PerToken

Stats = dict[str, Tensor]
# Of the last stage; with sequence parallelism t are this rank's tokens.
Hidden = Float[Tensor, "t 1 h"]
Scores = Float[Tensor, " scored"]
# (model, hidden states, microbatch, plan) -> one number a scored token
Head = Callable[[PolicyModel, Hidden, Microbatch, ParallelPlan], Scores]
# (model, hidden states of the last stage, what was made of a microbatch) -> (loss, statistics)
Objective = Callable[[PolicyModel, Tensor, Any], tuple[Tensor, Stats]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A microbatch with what was scored before its update; None takes the loss's own default (see `_loss_input`)."""

    microbatch: Microbatch
    old_logprobs: PerToken | None = None
    ref_logprobs: PerToken | None = None


class _GatherScores(torch.autograd.Function):
    """[p] scores of each context rank to all [S] of them on every rank; each rank keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, slots: Tensor, num_scored: int, group: Any) -> Tensor:
        ctx.save_for_backward(slots)
        whole = own.new_zeros(num_scored + 1)  # the last slot takes the dummies
        whole[slots] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return grads[0][slots], None, None, None


def _predictors(hidden: Tensor, microbatch: Microbatch, plan: ParallelPlan) -> Tensor:
    """[p, H] of this rank's hidden states [t, 1, H] those that score a token."""
    if plan.config.sequence:
        hidden = megatron.tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
    return gather_rows(hidden.squeeze(1), microbatch.predictors, repeated=microbatch.repeated)


def _over_context(values: Tensor, microbatch: Microbatch, plan: ParallelPlan) -> Tensor:
    """[S] of this rank's [p]: those of all context ranks."""
    if microbatch.slots is None:
        return values
    keep = max(microbatch.num_scored, 1)
    whole: Tensor = _GatherScores.apply(values, microbatch.slots, microbatch.num_scored, plan.context_group)  # type: ignore[no-untyped-call]
    return whole[:keep]


def value(model: PolicyModel, hidden: Hidden, microbatch: Microbatch, plan: ParallelPlan) -> Scores:
    """Hidden states of the last stage -> the value of the state before each scored token, fp32; of a critic's model."""
    found = _predictors(hidden, microbatch, plan).float() @ model.value_head.float()
    return _over_context(found, microbatch, plan)


def score(model: PolicyModel, hidden: Hidden, microbatch: Microbatch, plan: ParallelPlan) -> tuple[Scores, Scores]:
    """Hidden states of the last stage -> logprobs and entropies of the scored tokens, fp32."""
    logprobs, entropy = linear_logprob(
        _predictors(hidden, microbatch, plan),
        model.head_weight(),
        microbatch.targets,
        temperature=microbatch.temperature,
        ignore_index=IGNORED,
        return_entropy=True,
        tp_group=plan.tensor_group if plan.config.tensor > 1 else None,
        vocab_size=model.architecture.vocab_size,
    )
    assert entropy is not None
    return _over_context(logprobs, microbatch, plan), _over_context(entropy, microbatch, plan)


def logprob(model: PolicyModel, hidden: Hidden, microbatch: Microbatch, plan: ParallelPlan) -> Scores:
    """The first of `score`."""
    return score(model, hidden, microbatch, plan)[0]


def _unwrap(model: Any) -> PolicyModel:
    inner: PolicyModel = getattr(model, "module", model)
    return inner


def _hidden(model: Any, microbatch: Microbatch) -> Tensor:
    hidden: Tensor = model(microbatch.token_ids, microbatch.position_ids, None, packed_seq_params=microbatch.rows)
    return hidden


def _run(step: Any, items: Sequence[Any], model: Any, **options: Any) -> list[Any]:
    """Megatron's schedule over the items; answers what the last stage collected of each, in order."""
    chunks = chunks_of(model)
    collected: list[Any] = megatron.get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(items) for _ in chunks],  # each chunk runs all of them
        model=chunks,
        num_microbatches=len(items),
        seq_length=1,  # not used: stages exchange the shape of each microbatch
        micro_batch_size=1,
        **options,
    )
    return collected


@torch.no_grad()
def score_all(model: Any, microbatches: Sequence[Microbatch], plan: ParallelPlan, head: Head = logprob) -> list[Tensor]:
    """Logprobs (or what another head makes) [S] of each microbatch on the last stage; an empty list on the others."""

    def step(items: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Any]:
        microbatch = next(items)

        def collect(hidden: Tensor, non_loss_data: bool = False) -> Tensor:
            assert non_loss_data
            return head(_unwrap(chunk), hidden, microbatch, plan)

        return _hidden(chunk, microbatch), collect

    return _run(step, microbatches, model, forward_only=True, collect_non_loss_data=True)


def _loss_input(work: Work, logprobs: Tensor, entropy: Tensor, config: LearnerConfig) -> LossInput:
    """Without logprobs from before the update they are the engine's (old_logprobs = "rollout"), or those of this
    very forward: a step's only update is made by the policy that it scores, so the ratio is exactly 1.
    """
    streams = work.microbatch.streams
    old = work.old_logprobs
    if old is None:
        old = streams.rollout_logprobs if config.old_logprobs == "rollout" else logprobs.detach()
    return LossInput(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=streams.rollout_logprobs,
        ref_logprobs=work.ref_logprobs,
        entropy=entropy,
        advantages=streams.advantages,
        weight=streams.weight,
        loss_mask=streams.loss_mask,
        sequence_index=streams.sequence_index,
        fresh=streams.fresh,
    )


def forward_backward(model: Any, works: Sequence[Work], plan: ParallelPlan, config: LearnerConfig) -> list[Stats]:
    """Add the gradients of the policy's loss on all microbatches to the model's buffers, summed over all ranks; the last
    stage answers their statistics.
    """

    def objective(policy: PolicyModel, hidden: Tensor, work: Work) -> tuple[Tensor, Stats]:
        logprobs, entropy = score(policy, hidden, work.microbatch, plan)
        output = policy_loss(_loss_input(work, logprobs, entropy, config), config.loss, config.correction)
        return output.loss, output.stats

    return backward(model, works, objective)


def backward(model: Any, works: Sequence[Any], objective: Objective) -> list[Stats]:
    """As forward_backward, of any objective."""

    def step(items: Iterator[Any], chunk: Any) -> tuple[Tensor, Any]:
        work = next(items)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Stats]:
            found, stats = objective(_unwrap(chunk), hidden, work)
            # Megatron divides by this count at the end, which `sum_gradients` prevents: weights are in the loss
            # already.
            return found, torch.zeros((), dtype=torch.int, device=hidden.device), stats

        return _hidden(chunk, work.microbatch), loss

    return _run(step, works, model, forward_only=False)


def sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's finalisation without its division by a token count: gradients are sums over ranks and microbatches."""
    del num_tokens
    megatron.finalize_model_grads(model, None, **groups)


def _combine(totals: dict[str, float], name: str, number: float) -> None:
    if name in totals:
        number = max(totals[name], number) if name.startswith("max:") else totals[name] + number
    totals[name] = number


def sum_stats(stats: Sequence[Stats], plan: ParallelPlan) -> dict[str, float]:
    """Statistics of all microbatches of all ranks, added (or the largest taken) in one fixed order: equal on all ranks."""
    local: dict[str, float] = {}
    if plan.counts:
        for one in stats:
            # One copy from the device for all of them.
            numbers = torch.stack([value.double() for value in one.values()]).tolist()
            for name, number in zip(one, numbers, strict=True):
                _combine(local, name, number)
    gathered: list[dict[str, float]] = [local]
    if plan.world_size > 1:
        gathered = [{} for _ in range(plan.world_size)]
        dist.all_gather_object(gathered, local)
    totals: dict[str, float] = {}
    for part in gathered:
        for name, number in part.items():
            _combine(totals, name, number)
    return totals
