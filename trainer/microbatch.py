"""Cuts a Batch into the microbatches of one rank: packed tokens on the device, and the tokens to score with their
streams.

Only sampled tokens are scored: token i of a row from the hidden state at i-1, at the temperature it was sampled with.
A token that rows share is computed once (shared_prefixes.py) and scored in each of them. Invariant: over all
data-parallel ranks and microbatches every sampled token is scored exactly once; a microbatch without any still scores
one masked token, so that every collective runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.trainer.model.packing import PackedRows, local_tokens, pack_rows
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.shared_prefixes import shared_tokens, tokens_of
from rlagent.trainer.streams import PerToken, TokenIndex, TokenMask
from rlagent.types import Batch, Int16Array, Int64Array

IGNORED: Final = -100
"""The target of the token scored where there is none to score: linear_logprob answers 0 for it, without a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What the loss needs of each scored token."""

    rollout_logprobs: PerToken
    advantages: PerToken
    weight: PerToken
    loss_mask: TokenMask
    sequence_index: TokenIndex  # of the token's row in the batch: a row is never cut, so all of its tokens are here
    fresh: TokenMask | None  # sampled by the version that the learner holds; None where that is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One forward pass of one rank: t tokens here, of which p score a token (twice or more where rows that share them go on
    differently); S tokens are scored over all context ranks.

    `slots` places this rank's scores among the S; it is None where they are all of them. `origin` is the
    index of each scored token in the step's Batch (empty where nothing is sampled).
    """

    token_ids: Int64[Tensor, "1 t"]
    position_ids: Int64[Tensor, "1 t"]
    rows: PackedRows
    predictors: Int64[Tensor, " p"]  # local indices of hidden states
    targets: Int64[Tensor, " p"]
    temperature: Float[Tensor, " p"]
    repeated: bool  # predictors may not all be distinct
    slots: Int64[Tensor, " p"] | None
    num_scored: int
    streams: Streams
    origin: Int64Array
    num_tokens: int  # that are computed, over all context ranks, padding too


def _starts(batch: Batch) -> Int64Array:
    return batch.cu_seqlens[:-1].astype(np.int64)


def _token_indices(batch: Batch, rows: list[int]) -> Int64Array:
    pieces = [np.arange(batch.cu_seqlens[row], batch.cu_seqlens[row + 1], dtype=np.int64) for row in rows]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def check_batch(batch: Batch, vocab_size: int) -> None:
    """Raise LearnerError for a batch that cannot be scored."""
    nonempty = np.diff(batch.cu_seqlens) > 0
    if batch.loss_mask[_starts(batch)[nonempty]].any():
        raise LearnerError(
            "a row's first token is marked as sampled: it has no prompt to be scored after; give rows a prompt"
        )
    if batch.num_tokens and not 0 <= int(batch.token_ids.min()) <= int(batch.token_ids.max()) < vocab_size:
        raise LearnerError(
            f"a token id is outside the model's vocabulary of {vocab_size}: engine and learner differ in model"
        )
    if not batch.temperature[batch.loss_mask].all():
        raise LearnerError(
            "a token sampled at temperature 0 is marked for training; greedy tokens are never trained on"
        )


def make_microbatch(
    batch: Batch,
    rows: list[int],
    plan: ParallelPlan,
    inverse_frequencies: Tensor,
    dtype: torch.dtype,
    *,
    share: bool = False,
) -> Microbatch:
    """Pack some rows (possibly none) of a batch for this rank; share: compute common prefixes once (not with context
    parallelism).
    """
    device = plan.device
    index = _token_indices(batch, rows)
    lengths = np.diff(batch.cu_seqlens)[rows].astype(np.int64)
    computed, source = shared_tokens(tokens_of(batch, rows)) if share else _nothing_shared(len(index))
    stream = index[computed]
    num_padding = -len(stream) % plan.row_multiple or (0 if len(stream) else plan.row_multiple)
    tokens = np.concatenate((batch.token_ids[stream], np.zeros(num_padding, np.int32)))
    positions = np.concatenate((batch.position_ids[stream], np.arange(num_padding, dtype=np.int32)))
    bounds = np.cumsum(np.concatenate(([0], lengths, [num_padding] if num_padding else [])))
    context = (plan.config.context, plan.context_rank)
    own = local_tokens(len(tokens), *context)

    scored = np.flatnonzero(batch.loss_mask[index])  # of the whole rows, the indices of the targets
    predictors, targets, slots = _own_scores(scored, source[scored - 1], own, len(tokens))
    temperature = batch.temperature[index][targets] if len(scored) else np.ones(len(predictors), np.float32)
    target_ids = batch.token_ids[index][targets] if len(scored) else np.full(len(predictors), IGNORED)
    if len(scored):
        target_ids = np.where(slots < len(scored), target_ids, IGNORED)

    def put(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    repeated = not computed.all()
    padding = np.arange(len(stream), len(tokens))
    rows_layout = pack_rows(
        bounds.astype(np.int32),
        positions[own],
        inverse_frequencies,
        context=context,
        dtype=dtype,
        shared=(np.append(computed, padding >= 0), np.append(source, padding)) if repeated else None,
    )
    if batch.experts is not None:
        rows_layout.experts = put(_experts(batch.experts, stream, own, num_padding, plan))
    return Microbatch(
        token_ids=put(tokens[own].astype(np.int64))[None],
        position_ids=put(positions[own].astype(np.int64))[None],
        rows=rows_layout,
        predictors=put(predictors),
        targets=put(target_ids.astype(np.int64)),
        temperature=put(temperature),
        repeated=repeated,
        slots=put(slots) if plan.config.context > 1 else None,
        num_scored=len(scored),
        streams=_streams(batch, rows, index, scored, lengths, device),
        origin=index[scored],
        num_tokens=len(tokens),
    )


def _experts(
    recorded: Int16Array, index: Int64Array, own: Int64Array, num_padding: int, plan: ParallelPlan
) -> Int16Array:
    """Of the tokens that this rank routes: its own of the stream, of which sequence parallelism leaves it a part."""
    found = np.concatenate((recorded[index], np.full((num_padding, recorded.shape[1]), -1, np.int16)))[own]
    if plan.config.sequence:
        found = np.split(found, plan.config.tensor)[plan.tensor_rank]
    return found


def _nothing_shared(num_tokens: int) -> tuple[npt.NDArray[np.bool_], Int64Array]:
    return np.ones(num_tokens, dtype=np.bool_), np.arange(num_tokens, dtype=np.int64)


def _own_scores(
    scored: Int64Array, before: Int64Array, own: Int64Array, num_tokens: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(local hidden states, indices of their targets, slots among the scored) of this rank; one dummy where it has none. before: the
    computed token before each scored one.
    """
    local = np.full(num_tokens, -1, dtype=np.int64)
    local[own] = np.arange(len(own))
    holder = local[before]
    mine = np.flatnonzero(holder >= 0)
    if len(mine):
        return holder[mine], scored[mine], mine.astype(np.int64)
    return np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, len(scored), np.int64)


def _streams(
    batch: Batch, rows: list[int], index: Int64Array, scored: Int64Array, lengths: Int64Array, device: torch.device
) -> Streams:
    if not len(scored):
        zero = torch.zeros(1, device=device)
        return Streams(
            rollout_logprobs=zero,
            advantages=zero,
            weight=zero,
            loss_mask=torch.zeros(1, dtype=torch.bool, device=device),
            sequence_index=torch.zeros(1, dtype=torch.int64, device=device),
            fresh=None if batch.version is None else torch.zeros(1, dtype=torch.bool, device=device),
        )
    origin = index[scored]
    sequences = np.repeat(np.asarray(rows, dtype=np.int64), lengths)[scored]
    return Streams(
        rollout_logprobs=torch.from_numpy(batch.rollout_logprobs[origin]).to(device),
        advantages=torch.from_numpy(batch.advantages[origin]).to(device),
        weight=torch.from_numpy(batch.weight[origin]).to(device),
        loss_mask=torch.ones(len(scored), dtype=torch.bool, device=device),
        sequence_index=torch.from_numpy(sequences).to(device),
        fresh=None if batch.version is None else torch.from_numpy(batch.versions[origin] == batch.version).to(device),
    )
