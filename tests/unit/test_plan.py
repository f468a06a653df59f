"""The planner by hand: balance, determinism, and rows that fit nowhere."""

import time

import pytest

from rlagent.errors import LearnerError
from rlagent.trainer.plan import cost, plan


def test_one_microbatch_where_all_fits() -> None:
    assert plan([3, 2, 1], budget=6, ranks=1) == (((0, 1, 2),),)


def test_no_rows_are_one_empty_microbatch_on_every_rank() -> None:
    assert plan([], budget=10, ranks=3) == (((),), ((),), ((),))


def test_a_rank_without_rows_runs_as_many_microbatches() -> None:
    assert plan([5], budget=5, ranks=2) == (((0,),), ((),))


def test_longest_first_into_the_cheapest() -> None:
    # 4 and 3 open the two bins, 2 joins the lighter (3), 1 the one with room (4); the dearer of the two comes first
    assert plan([1, 2, 3, 4], budget=5, ranks=1) == (((0, 3), (1, 2)),)


def test_the_cheapest_without_room_is_passed_over_not_forgotten() -> None:
    lengths = [6, 5, 4, 3, 2]  # budget 10, two bins: 6 | 5, then 4 joins 5, 3 joins 6, 2 finds no room in 9 and 9
    found = plan(lengths, budget=10, ranks=1)
    assert sorted(row for microbatch in found[0] for row in microbatch) == [0, 1, 2, 3, 4]
    assert all(sum(lengths[row] for row in microbatch) <= 10 for microbatch in found[0])


def test_attention_makes_one_long_row_dearer_than_its_tokens_in_short_rows() -> None:
    assert cost(8192) == 2 * 8192
    assert cost(8192) > 8 * cost(1024)


def test_the_plan_balances_cost() -> None:
    lengths = [100] * 8 + [10] * 8
    loads = [
        sum(cost(lengths[row]) for microbatch in rank for row in microbatch)
        for rank in plan(lengths, budget=250, ranks=2)
    ]
    assert max(loads) / min(loads) < 1.05


def test_the_plan_stays_the_same() -> None:
    # A resume is bitwise only if a batch is cut again as it was.
    assert plan([7, 3, 9, 4, 4, 8, 2, 6], budget=16, ranks=2) == (((2, 6), (0, 4)), ((1, 5), (3, 7)))


def test_a_row_over_the_budget_is_named() -> None:
    with pytest.raises(LearnerError, match=r"row 1 has 50 tokens.*\(40\).*learner\.batch\.tokens.*max_row_tokens"):
        plan([10, 50], budget=40, ranks=1)


def test_a_large_batch_is_planned_at_once() -> None:
    lengths = [50 + (i * 7919) % 4000 for i in range(20_000)]
    started = time.perf_counter()
    plan(lengths, budget=16384, ranks=8)
    assert time.perf_counter() - started < 30
