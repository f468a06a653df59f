"""Advantage estimators against hand-computed numbers, and the learner's invariant 14."""

import math

import numpy as np
import pytest
from groups import group

from rlagent.errors import LearnerError, LoadError
from rlagent.trainer.advantage import advantages
from rlagent.trainer.batch import pack
from rlagent.trainer.config import AdvantageConfig, LossConfig


def values(rewards: list[float], name: str, **options: object) -> list[float]:
    return list(advantages([group(rewards)], AdvantageConfig(name=name, epsilon=0.0, **options)).values())  # type: ignore[arg-type]


def test_hand_computed_numbers() -> None:
    # rewards 1 0 0 1: mean 0.5, std with ddof 1 is sqrt(4 * 0.25 / 3)
    std = math.sqrt(1 / 3)
    assert values([1, 0, 0, 1], "grpo") == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std])
    assert values([1, 0, 0, 1], "dr_grpo") == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert values([1, 0, 0, 1], "rloo") == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert values([3, 0], "rloo") == pytest.approx([3, -3])


def test_opo_weighs_the_baseline_by_length() -> None:
    found = advantages([group([1.0, 0.0], rows=[[[0, 1, 1, 1]], [[0, 1]]])], AdvantageConfig(name="opo"))
    assert list(found.values()) == pytest.approx([1 - 3 / 4, -3 / 4])


def test_a_group_that_sampled_nothing_has_no_length_weighted_baseline() -> None:
    found = advantages([group([1.0, 0.0], rows=[[[0, 0]], [[0, 0]]])], AdvantageConfig(name="opo"))
    assert list(found.values()) == [0.0, 0.0]


def test_reinforce_pp_baseline_is_white_over_the_batch_tokens() -> None:
    groups = [group([1.0, 0.0], name="a", rows=[[[0, 1, 1]], [[0, 1]]]), group([1.0, 1.0, 0.0], name="b")]
    found = advantages(groups, AdvantageConfig(name="reinforce_pp_baseline", epsilon=0.0))
    lengths = np.array([2, 1, 2, 2, 2])
    a = np.array(list(found.values()))
    assert lengths @ a == pytest.approx(0, abs=1e-9)
    assert lengths @ a**2 / lengths.sum() == pytest.approx(1)


def test_whitening_where_one_rollout_holds_all_the_tokens() -> None:
    found = advantages(
        [group([1.0, 0.0], rows=[[[0, 1, 1]], [[0, 0]]])], AdvantageConfig(name="reinforce_pp_baseline", epsilon=0.0)
    )
    assert list(found.values()) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("rewards", [[1.0], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_invariant_14_no_variance_gives_no_gradient(name: str, rewards: list[float]) -> None:
    assert values(rewards, name) == [0.0] * len(rewards)


def test_invariant_14_a_group_without_variance_beside_another() -> None:
    groups = [group([1.0, 1.0], name="flat", rows=[[[0, 1]], [[0, 1, 1]]]), group([1.0, 0.0], name="b")]
    for name in ("grpo", "dr_grpo", "rloo", "opo"):
        found = advantages(groups, AdvantageConfig(name=name))
        assert (found["flat-0"], found["flat-1"]) == (0.0, 0.0), name


def test_invariant_14_whitening_over_the_batch_moves_every_group_by_the_same() -> None:
    # REINFORCE++ subtracts the mean over all tokens, which is not 0 where better rollouts are longer.
    groups = [group([1.0, 1.0], name="flat"), group([1.0, 0.0], name="b", rows=[[[0, 1, 1, 1]], [[0, 1]]])]
    found = advantages(groups, AdvantageConfig(name="reinforce_pp_baseline", epsilon=0.0))
    mean = (3 * 0.5 - 0.5) / 8
    std = math.sqrt((4 * mean**2 + 3 * (0.5 - mean) ** 2 + (0.5 + mean) ** 2) / 8)
    assert list(found.values()) == pytest.approx([-mean / std, -mean / std, (0.5 - mean) / std, (-0.5 - mean) / std])


def test_rewards_that_differ_by_rounding_only_do_not_train() -> None:
    found = advantages([group([0.1 + 0.2, 0.3, 0.3])], AdvantageConfig())
    assert max(map(abs, found.values())) < 1e-9


def test_a_row_with_nothing_sampled_does_not_move_the_baseline() -> None:
    # A bug others shipped: the rollout left the batch before the group's mean was taken.
    groups = [group([1.0, 0.0, 0.0], rows=[[[0, 1]], [[0, 1]], [[0, 0]]])]
    with_empty = pack(groups, advantage=AdvantageConfig(name="dr_grpo"), loss=LossConfig(), max_row_tokens=100)
    assert with_empty.dropped == {"nothing_sampled": 1}
    assert with_empty.batch.advantages[with_empty.batch.loss_mask] == pytest.approx([2 / 3, -1 / 3])


def test_fan_out_into_rows_does_not_move_the_baseline() -> None:
    one = advantages([group([1.0, 0.0])], AdvantageConfig())
    many = advantages([group([1.0, 0.0], rows=[[[0, 1]] * 5, [[0, 1]]])], AdvantageConfig())
    assert one == many


def test_ungrouped_rollouts_share_one_baseline_or_are_refused() -> None:
    bundles = [group([1.0, 1.0], name="u1", ungrouped=True), group([0.0, 0.0], name="u2", ungrouped=True)]
    assert list(advantages(bundles, AdvantageConfig(name="dr_grpo")).values()) == pytest.approx([0.5, 0.5, -0.5, -0.5])
    with pytest.raises(LearnerError, match="group_id"):
        advantages(bundles, AdvantageConfig(ungrouped="error"))


def test_an_estimator_by_path(tmp_path: object) -> None:
    file = f"{tmp_path}/mine.py"
    with open(file, "w") as f:
        f.write(
            "def double(rewards, lengths, epsilon):\n    return 2 * rewards\n"
            "def bad(rewards, lengths, epsilon):\n    return rewards[:1] / 0\n"
        )
    assert values([1.0, 0.5], f"{file}:double") == [2.0, 1.0]
    with pytest.raises(LearnerError, match="bad"), np.errstate(divide="ignore", invalid="ignore"):
        values([1.0, 0.5], f"{file}:bad")
    with pytest.raises(LoadError, match="none"):
        values([1.0], "none.py:function")
