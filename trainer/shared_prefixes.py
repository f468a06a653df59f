"""Prefixes that rows have in common, computed once: rows of a group begin with one prompt, branches of a rollout with one history.

What a causal model computes at a token depends on the tokens before it alone, so rows that begin alike have the same hidden states there.
A microbatch then holds each such token once; attention still sees whole rows (model/packing.py), and the gradients of all rows add up
in the token that they share. In the flow: learner.py asks `plan_rows` which rows are computed together, microbatch.py asks
`shared_tokens` what they share. Pure numpy.

Invariant: a token is shared only with one at the same place of its row after the same tokens (and routed to the same experts where
routing is replayed), so no logprob changes but by rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rlagent.trainer.plan import Plan, attention_cost, plan
from rlagent.types import Batch, Int32Array, Int64Array

Rows = Sequence[npt.NDArray[np.int32]]
_COPY: Final = 0.125
"""What attention's copy of a shared token weighs against a computed one: its query, key and value against a layer's activations."""


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """How many leading tokens two rows [n, k] share."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).any(axis=1)
    return int(differ.argmax()) if differ.any() else length


def _sorted(rows: Rows) -> list[int]:
    """Rows in an order in which each shares most with its neighbours."""
    keys = [row.astype(">i4").tobytes() for row in rows]
    return sorted(range(len(rows)), key=lambda row: (keys[row], row))


def shared_tokens(rows: Rows) -> tuple[npt.NDArray[np.bool_], Int64Array]:
    """rows: of each its tokens [n, k], a token's id first. -> (where a token of the stream [T] is computed, for each the index of the
    computed token [T] that it is).
    """
    bounds = np.cumsum([0, *(len(row) for row in rows)])
    order = _sorted(rows)
    common = [(before, row, _common(rows[before], rows[row])) for before, row in itertools.pairwise(order)]
    computed = np.ones(int(bounds[-1]), dtype=np.bool_)
    for _, row, length in common:
        computed[bounds[row] : bounds[row] + length] = False
    source = np.cumsum(computed, dtype=np.int64) - 1
    for before, row, length in common:  # in the sorted order: what the row before shares is known already
        source[bounds[row] : bounds[row] + length] = source[bounds[before] : bounds[before] + length]
    return computed, source


def tokens_of(batch: Batch, rows: Sequence[int]) -> list[npt.NDArray[np.int32]]:
    """Of each row what must be equal for two tokens to be one: ids [n, 1], followed by the experts where routing is replayed."""
    found = []
    for row in rows:
        start, end = batch.cu_seqlens[row], batch.cu_seqlens[row + 1]
        ids: Int32Array = batch.token_ids[start:end, None]
        found.append(ids if batch.experts is None else np.hstack((ids, batch.experts[start:end].astype(np.int32))))
    return found


class _Order:
    """Rows sorted, so that those which share stand together. Sizes count a shared token once, and its copies for what they weigh."""

    def __init__(self, rows: Rows) -> None:
        self.rows = _sorted(rows)
        self.lengths = [len(rows[row]) for row in self.rows]
        neighbours = [_common(rows[one], rows[other]) for one, other in itertools.pairwise(self.rows)]
        self.shared = np.array([0, *neighbours], dtype=np.int64)  # with the row before
        self._place = {row: place for place, row in enumerate(self.rows)}

    def size(self, rows: Sequence[int]) -> float:
        """Of a microbatch of some rows. Two rows of a sorted order share the least that neighbours between them do."""
        places = sorted(self._place[row] for row in rows)
        shared = sum(int(self.shared[one + 1 : other + 1].min()) for one, other in itertools.pairwise(places))
        return sum(self.lengths[place] for place in places) - shared * (1 - _COPY)

    def cost(self, rows: Sequence[int]) -> float:
        """Its size, and attention's quadratic part."""
        return self.size(rows) + sum(attention_cost(self.lengths[self._place[row]]) for row in rows)

    def cut(self, budget: int, limit: float) -> list[tuple[int, ...]]:
        """Microbatches of neighbours, each filled up to the budget or to a limit of its cost, which a single row may pass."""
        found: list[list[int]] = []
        size = load = 0.0
        for row, length, shared in zip(self.rows, self.lengths, self.shared.tolist(), strict=True):
            added = length - shared * (1 - _COPY)
            if not found or size + added > budget or load + added + attention_cost(length) > limit:
                found.append([])
                size, load, added = 0.0, 0.0, float(length)
            found[-1].append(row)
            size += added
            load += added + attention_cost(length)
        return [tuple(sorted(rows)) for rows in found]

    def neighbours(self, budget: int, ranks: int) -> Plan:
        """The evenest cut into as few microbatches as the budget and the ranks allow."""
        low, high = 0.0, self.cost(self.rows)
        number = -(-len(self.cut(budget, high)) // ranks) * ranks
        for _ in range(40):  # halved until rounding
            middle = (low + high) / 2
            low, high = (low, middle) if len(self.cut(budget, middle)) <= number else (middle, high)
        parts = sorted(self.cut(budget, high), key=lambda rows: (-self.cost(rows), rows))
        parts += [()] * (number - len(parts))
        return tuple(tuple(parts[rank::ranks]) for rank in range(ranks))


def plan_rows(batch: Batch, *, budget: int, ranks: int, share: bool) -> Plan:
    """As `plan`, of a batch's rows. share: rows that begin alike are computed together where that is cheaper."""
    found = plan(np.diff(batch.cu_seqlens).tolist(), budget=budget, ranks=ranks)
    if not share or not batch.num_rows:
        return found
    order = _Order(tokens_of(batch, range(batch.num_rows)))
    if not order.shared.any():
        return found

    def time(planned: Plan) -> float:  # ranks meet after each microbatch
        return sum(max(map(order.cost, together)) for together in zip(*planned, strict=True))

    return min(found, order.neighbours(budget, ranks), key=time)
