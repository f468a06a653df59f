"""Advantages: the learner's invariants 15 and 16 on any rewards, and bounds that no group can leave."""

import math
from typing import Any

import numpy as np
import pytest
from groups import group
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlagent.trainer.advantage import advantages
from rlagent.trainer.config import AdvantageConfig

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=8)
# Differences of smaller numbers have squares that a double cannot hold.
ANY_REWARDS = st.lists(st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-100), min_size=1, max_size=8)
LENGTHS = st.lists(st.integers(1, 6), min_size=8, max_size=8)
NAMES = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline")


def values(rewards: list[float], name: str, epsilon: float = 0.0, lengths: list[int] | None = None) -> list[float]:
    rows = None if lengths is None else [[[0, *[1] * n]] for n in lengths]
    return list(advantages([group(rewards, rows=rows)], AdvantageConfig(name=name, epsilon=epsilon)).values())


@given(REWARDS)
@settings(deadline=None, max_examples=50)
def test_invariant_15_sums_to_zero_and_rloo_is_the_scaled_mean_form(rewards: list[float]) -> None:
    for name in ("grpo", "dr_grpo", "rloo"):
        assert sum(values(rewards, name)) == pytest.approx(0, abs=1e-9)
    n = len(rewards)
    assert values(rewards, "rloo") == pytest.approx([n / (n - 1) * a for a in values(rewards, "dr_grpo")])
    others = [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    assert values(rewards, "rloo") == pytest.approx(others, abs=1e-9)


@given(REWARDS, LENGTHS)
@settings(deadline=None, max_examples=50)
def test_invariant_15_the_sums_that_are_zero_by_token(rewards: list[float], lengths: list[int]) -> None:
    for name in ("opo", "reinforce_pp_baseline"):
        found = values(rewards, name, lengths=lengths)
        assert np.array(lengths[: len(rewards)]) @ found == pytest.approx(0, abs=1e-9)


@given(REWARDS, st.floats(-2, 2), st.floats(0.5, 4), LENGTHS)
@settings(deadline=None, max_examples=50)
def test_invariant_16_shifts_and_scales_of_the_reward(
    rewards: list[float], shift: float, scale: float, lengths: list[int]
) -> None:
    moved = [reward + shift for reward in rewards]
    scaled = [reward * scale + shift for reward in rewards]
    for name in NAMES:
        plain = values(rewards, name, lengths=lengths)
        assert values(moved, name, lengths=lengths) == pytest.approx(plain, abs=1e-6)
        factor = 1 if name in ("grpo", "reinforce_pp_baseline") else scale
        assert values(scaled, name, lengths=lengths) == pytest.approx([factor * a for a in plain], abs=1e-5)


@given(ANY_REWARDS, st.sampled_from([0.0, 1e-6]))
@example([0.3, 0.1 + 0.2, 0.3], 0.0)
@example([5e-324, 0.0], 0.0)
@settings(deadline=None, max_examples=100)
def test_no_rewards_blow_up_the_normalised_advantage(rewards: list[float], epsilon: float) -> None:
    # A bug others shipped: std over the others only, near 0, gave one rollout an advantage of -2075.
    found = values(rewards, "grpo", epsilon)
    assert all(math.isfinite(a) and abs(a) <= math.sqrt(len(rewards) - 1) + 1e-6 for a in found)


@given(ANY_REWARDS, st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_fan_out_into_rows_moves_nothing(rewards: list[float], num_rows: int) -> None:
    whole: Any = [[[0, *[1] * num_rows]] for _ in rewards]
    fanned: Any = [[[0, 1]] * num_rows for _ in rewards]
    for name in NAMES:
        config = AdvantageConfig(name=name)
        assert advantages([group(rewards, rows=whole)], config) == advantages([group(rewards, rows=fanned)], config)
