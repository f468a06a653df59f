"""Credit that needs more than a rollout's total: by hand, and what a group without variance gives."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from groups import group
from pydantic import ValidationError

from rlagent.errors import LearnerError
from rlagent.trainer import advantage, token_loss
from rlagent.trainer.advantage import advantages, shaped
from rlagent.trainer.batch import pack
from rlagent.trainer.config import ESTIMATORS, LOSSES, AdvantageConfig, LossConfig, OverlongConfig
from rlagent.trainer.credit_rows import credit, token_rewards
from rlagent.types import Group, Reward


def rewarded(base: Group, rewards: list[Reward]) -> Group:
    rollouts = [replace(rollout, reward=reward) for rollout, reward in zip(base.rollouts, rewards, strict=True)]
    return replace(base, rollouts=tuple(rollouts))


def two_turns(rewards: list[Reward]) -> Group:
    """Rollouts of two calls with one and two sampled tokens."""
    base = group([0.0] * len(rewards), rows=[[[0, 1, 0, 1, 1]]] * len(rewards))
    turns = np.array([0, 0, 1, 1, 1], np.int32)
    rollouts = [
        replace(r, rows=(replace(r.rows[0], turn=turns, call_ids=(f"{i}a", f"{i}b")),))
        for i, r in enumerate(base.rollouts)
    ]
    return rewarded(replace(base, rollouts=tuple(rollouts)), rewards)


def config(name: str, **options: Any) -> AdvantageConfig:
    return AdvantageConfig(name=name, epsilon=0.0, **options)


def sampled(groups: list[Group], c: AdvantageConfig) -> list[float]:
    found: list[float] = []
    rows = credit(groups, c)
    for rollout in (r for g in groups for r in g.rollouts):
        for row, values in zip(rollout.rows, rows[rollout.rollout_id], strict=True):
            found += np.broadcast_to(values, len(row))[row.loss_mask].tolist()
    return found


def test_the_names_that_settings_know_are_the_functions() -> None:
    assert set(LOSSES) == set(token_loss.TOKEN_LOSSES)
    by_token = {"reinforce_pp", "turn_level", "gae", "remax", "gdpo"}
    assert set(ESTIMATORS) == set(advantage._BY_NAME) | by_token


@pytest.mark.parametrize("made", [lambda: AdvantageConfig(name="grppo"), lambda: LossConfig(name="pppo")])
def test_an_unknown_name_is_refused_at_once_with_the_nearest(made: Any) -> None:
    with pytest.raises(ValidationError, match=r"did you mean '(grpo|ppo)'.*file.py:function"):
        made()


def test_reinforce_pp_discounts_and_whitens_over_the_batch() -> None:
    groups = [group([1.0], rows=[[[0, 1, 1]]], name="a"), group([0.0], rows=[[[0, 1]]], name="b")]
    returns = np.array([0.5, 1.0, 0.0])
    found = sampled(groups, config("reinforce_pp", gamma=0.5))
    assert found == pytest.approx(((returns - returns.mean()) / returns.std()).tolist())
    assert sampled([group([1.0, 1.0])], config("reinforce_pp")) == [0.0] * 4


def test_remax_is_the_reward_over_that_of_the_greedy_rollout() -> None:
    rewards = [Reward(components={"reward": r}, calls={"greedy": 0.25}) for r in (1.0, 0.0)]
    assert list(advantages([rewarded(group([0, 0]), rewards)], config("remax")).values()) == [0.75, -0.25]
    with pytest.raises(LearnerError, match="greedy rollout"):
        advantages([group([1.0, 0.0])], config("remax"))


def test_gdpo_normalises_each_component_by_itself() -> None:
    # correct: z = +-1/sqrt(2) of two; format is ten times as large and has the opposite order
    rewards = [Reward(components={"correct": 1.0, "format": 0.0}), Reward(components={"correct": 0.0, "format": 10.0})]
    groups = [rewarded(group([0, 0]), rewards)]
    assert list(advantages(groups, config("gdpo")).values()) == [0.0, 0.0]
    weighed = advantages(groups, config("gdpo", components={"correct": 2.0, "format": 1.0}))
    assert list(weighed.values()) == pytest.approx([1.0, -1.0])  # z of one weight is left, whitened over the batch


def test_turn_level_adds_each_turns_return_over_the_groups_mean() -> None:
    calls = [{"0a": 1.0, "0b": 0.0}, {"1a": 0.0, "1b": 2.0}]
    totals = (1.0, 0.0)
    groups = [two_turns([Reward(components={"r": t}, calls=c) for t, c in zip(totals, calls, strict=True)])]
    # returns with gamma 0.5: 1, 0 and 1, 2; their means by turn 1, 1; outcome +-0.5
    expected = [0.5 + 0, 0.5 - 1, 0.5 - 1, -0.5 + 0, -0.5 + 1, -0.5 + 1]
    assert sampled(groups, config("turn_level", gamma=0.5)) == pytest.approx(expected)


def test_turn_level_of_a_turn_that_one_rollout_alone_reached_is_its_outcome() -> None:
    longer = two_turns([Reward(components={"r": 1.0})])
    shorter = group([1.0], name="other")
    both = replace(longer, rollouts=(*longer.rollouts, *shorter.rollouts))
    assert sampled([both], config("turn_level")) == [0.0] * 5


def test_rewards_by_token_stand_where_they_were_earned() -> None:
    rollout = two_turns([Reward(components={"r": 3.0}, calls={"0a": 0.5, "0b": 0.25})]).rollouts[0]
    assert [row.tolist() for row in token_rewards(rollout, config("gae"))] == [[0, 0.5, 0, 0, 3.25]]
    batch = pack(
        [two_turns([Reward(components={"r": 3.0})])], advantage=config("gae"), loss=LossConfig(), max_row_tokens=9
    ).batch
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [0, 0, 0, 0, 3]
    assert not batch.advantages.any()


@pytest.mark.parametrize(("length", "expected"), [(4, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (30, -0.5)])
def test_overlong_rollouts_are_punished_softly(length: int, expected: float) -> None:
    rollout = group([1.0], rows=[[[0] + [1] * length]]).rollouts[0]
    overlong = OverlongConfig(max_tokens=8, buffer=2, penalty=0.5)
    assert shaped(rollout, overlong).reward.total == pytest.approx(1.0 + expected)
    assert shaped(rollout, OverlongConfig()) is rollout


def test_the_best_and_the_worst_are_the_pair_of_dpo() -> None:
    assert list(advantages([group([0.5, 1.0, 0.0])], config("preference")).values()) == [0.0, 1.0, -1.0]
    assert list(advantages([group([0.5, 0.5])], config("preference")).values()) == [0.0, 0.0]
