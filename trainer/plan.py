"""The planner: which row is computed by which rank in which microbatch. Pure.

Invariant: every row exactly once, no microbatch over the token budget, and as many microbatches on every rank (pipeline stages
and collectives meet); microbatches are balanced by cost.
"""

import heapq
from collections.abc import Sequence
from typing import Final

from rlagent.errors import LearnerError

Plan = tuple[tuple[tuple[int, ...], ...], ...]
# Attention's share of a token's cost, per token of context, relative to the dense part: about 2 * 6 * context FLOPs against
# 6 * parameters of a layer, for a layer of width 1024.
_ATTENTION_COST: Final = 1.0 / 8192.0


def attention_cost(length: int) -> float:
    """The quadratic part of a row's cost."""
    return _ATTENTION_COST * length * length


def cost(length: int) -> float:
    """Relative cost of a row: linear layers plus quadratic attention."""
    return length + attention_cost(length)


def plan(lengths: Sequence[int], *, budget: int, ranks: int) -> Plan:
    """Rows of each microbatch of each rank: [ranks][microbatches][rows].

    LearnerError for a row that is longer than the budget.
    """
    too_long = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if too_long is not None and lengths[too_long] > budget:
        raise LearnerError(
            f"row {too_long} has {lengths[too_long]} tokens, more than the token budget of a microbatch ({budget}); raise "
            "learner.batch.tokens, or set learner.batch.max_row_tokens to drop such rows"
        )
    num_bins = ranks * max(1, -(-sum(lengths) // (budget * ranks)))
    while (bins := _fill(lengths, budget, num_bins)) is None:
        num_bins += ranks
    # Heaviest microbatches side by side: ranks that step together carry alike loads.
    ordered = sorted(bins, key=lambda rows: (-sum(cost(lengths[row]) for row in rows), rows))
    return tuple(tuple(tuple(rows) for rows in ordered[rank::ranks]) for rank in range(ranks))


def _fill(lengths: Sequence[int], budget: int, num_bins: int) -> list[list[int]] | None:
    """Longest rows first, each into the cheapest bin that has room; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    used = [0] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        full = []
        while heap and used[heap[0][1]] + lengths[row] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heapq.heappop(heap)
        bins[index].append(row)
        used[index] += lengths[row]
        for entry in (*full, (load + cost(lengths[row]), index)):
            heapq.heappush(heap, entry)
    return [sorted(rows) for rows in bins]
