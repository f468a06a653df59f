"""The planner: every row once, within the budget, as many microbatches on every rank."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.trainer.plan import cost, plan

LENGTHS = st.lists(st.integers(1, 100), max_size=40)


@given(LENGTHS, st.integers(100, 300), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_each_row_once_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    found = plan(lengths, budget=budget, ranks=ranks)
    assert sorted(row for rank in found for microbatch in rank for row in microbatch) == list(range(len(lengths)))
    assert len(found) == ranks
    assert len({len(rank) for rank in found}) == 1
    assert len(found[0]) >= 1
    assert all(sum(lengths[row] for row in microbatch) <= budget for rank in found for microbatch in rank)
    assert found == plan(lengths, budget=budget, ranks=ranks)


@given(LENGTHS, st.integers(100, 300), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_few_microbatches(lengths: list[int], budget: int, ranks: int) -> None:
    # Twice what a perfect packing would take, and the rounding to whole ranks.
    found = plan(lengths, budget=budget, ranks=ranks)
    fewest = -(-sum(lengths) // budget)
    assert len(found[0]) * ranks <= 2 * fewest + 2 * ranks


@given(st.lists(st.integers(1, 100), min_size=8, max_size=40), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_ranks_that_step_together_differ_by_at_most_one_row(lengths: list[int], ranks: int) -> None:
    found = plan(lengths, budget=sum(lengths), ranks=ranks)
    loads = [[sum(cost(lengths[row]) for row in microbatch) for microbatch in rank] for rank in found]
    for side_by_side in zip(*loads, strict=True):
        assert max(side_by_side) - min(side_by_side) <= cost(max(lengths)) + 1e-6
