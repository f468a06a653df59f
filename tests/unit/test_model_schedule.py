"""The learning rate, by hand."""

from __future__ import annotations

import pytest

from rlagent.trainer.config import OptimizerConfig
from rlagent.trainer.optimizer import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step, total) for step in range(total)]


def test_constant_after_a_linear_warm_up() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_minimum_in_the_last_step() -> None:
    assert rates(6, warmup_steps=1, schedule="linear", min_lr=0.2) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle_and_never_rises() -> None:
    found = rates(11, schedule="cosine")
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found[10] == pytest.approx(0.0)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 5), (3, 3)])
def test_short_runs_have_a_rate_in_every_step(schedule: str, total: int, warmup: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(total, schedule=schedule, warmup_steps=warmup))
