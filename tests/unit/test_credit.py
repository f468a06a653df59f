"""Credit made of scores: KL in the reward, gae, distillation, preferences; by hand and against autograd."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from groups import group

from rlagent.errors import LearnerError
from rlagent.trainer.batch import pack
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.trainer.credit import Scores, credited, score_metrics
from rlagent.types import Batch, Float32Array

ROWS = [[[0, 1, 0, 1]], [[0, 1, 1]]]


def batch(name: str, rewards: list[float], rows: Any = ROWS) -> Batch:
    return pack(
        [group(rewards, rows=rows)], advantage=AdvantageConfig(name=name), loss=LossConfig(), max_row_tokens=9
    ).batch


def floats(*values: float) -> Float32Array:
    return np.array(values, dtype=np.float32)


POLICY = floats(0, -1, 0, -2, 0, -1, -0.5)
REFERENCE = floats(0, -1.5, 0, -1, 0, -1, -1)


def test_kl_in_the_reward_is_what_a_token_and_those_after_it_pay() -> None:
    given = batch("dr_grpo", [1.0, 0.0])
    loss = LossConfig(kl_coef=0.1, kl_estimator="k1", kl_in="reward")
    found, returns = credited(
        given, Scores(policy=POLICY, reference=REFERENCE), AdvantageConfig(name="dr_grpo", gamma=0.5), loss
    )
    assert returns is None
    # k1 by token: 0.5, -1 and 0, 0.5; to go with gamma 0.5: 0, -1 and 0.25, 0.5
    expected = [0, 0.5, 0, 0.5 + 0.1, 0, -0.5 - 0.025, -0.5 - 0.05]
    assert found.advantages.tolist() == pytest.approx(expected)


def test_gae_takes_the_rewards_where_they_were_earned_and_kl_off_them() -> None:
    given = batch("gae", [1.0, 0.0])
    config = AdvantageConfig(name="gae", whiten=False)
    values = floats(0, 0.5, 0, 0.25, 0, 0.5, 0.5)
    found, returns = credited(given, Scores(values=values), config, LossConfig())
    assert returns is not None
    assert returns.tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert found.advantages.tolist() == [0, 0.5, 0, 0.75, 0, -0.5, -0.5]
    white, again = credited(given, Scores(values=values), AdvantageConfig(name="gae"), LossConfig())
    sampled = white.advantages[given.loss_mask]
    assert (sampled.mean(), sampled.std()) == pytest.approx((0, 1), abs=1e-5)
    assert again is not None
    assert again.tolist() == returns.tolist()  # the critic learns them as they were
    paying = LossConfig(kl_coef=0.1, kl_estimator="k1", kl_in="reward")
    _, returns = credited(given, Scores(values=values, policy=POLICY, reference=REFERENCE), config, paying)
    assert returns is not None
    assert returns.tolist() == pytest.approx([0, 1 + 0.05, 0, 1 + 0.1, 0, -0.05, -0.05])


def whitened_rms(error: float, config: AdvantageConfig, reward: float = 1.0) -> float:
    """Root mean square of the advantages of rollouts that all earn `reward`, by a critic that is off by +-`error`."""
    given = batch("gae", [reward, reward])
    off = np.where(np.arange(given.num_tokens) % 2, error, -error).astype(np.float32)
    values = np.where(given.loss_mask, reward + off, 0).astype(np.float32)
    found, _ = credited(given, Scores(values=values), config, LossConfig())
    return float(np.sqrt(np.square(found.advantages[found.loss_mask]).mean()))


def test_whitening_does_not_make_rewards_of_a_critics_last_errors() -> None:
    """Where all succeed the advantages are the critic's error: divided by its own deviation, an error of a thousandth, or of rounding,
    drives the policy as hard as winning or losing did.
    """
    plain = AdvantageConfig(name="gae", whiten=False, lam=0.0)
    wild = AdvantageConfig(name="gae", lam=0.0, min_deviation=0.0)
    mended = AdvantageConfig(name="gae", lam=0.0)
    assert whitened_rms(1e-3, plain) < 2.1e-3
    assert whitened_rms(1e-3, wild) > 0.9
    assert whitened_rms(1e-3, mended) < 2.1e-2
    assert whitened_rms(0.3, mended) == pytest.approx(whitened_rms(0.3, wild)) == pytest.approx(1, abs=1e-4)
    assert whitened_rms(0.0, wild.model_copy(update={"epsilon": 0.0})) == 0


def test_distillation_likes_what_the_teacher_likes() -> None:
    given = replace(batch("grpo", [1.0, 0.0]), teacher_logprobs=REFERENCE)
    found, _ = credited(given, Scores(policy=POLICY), AdvantageConfig(), LossConfig(name="opd"))
    assert found.advantages.tolist() == pytest.approx([0, -0.5, 0, 1, 0, 0, -0.5])
    with pytest.raises(LearnerError, match=r"learner\.teacher\.url"):
        credited(batch("grpo", [1.0, 0.0]), Scores(policy=POLICY), AdvantageConfig(), LossConfig(name="opd"))


def test_invariant_11_preferences_have_the_gradient_of_dpo() -> None:
    rows = [[[0, 1, 0, 1]], [[0, 1, 1]], [[0, 1]]]
    given = batch("preference", [1.0, 0.0, 0.5], rows)
    mask = torch.from_numpy(given.loss_mask)
    policy = torch.tensor([0, -1, 0, -2, 0, -1, -0.5, 0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = np.append(REFERENCE, floats(0, -2))
    scores = Scores(policy=policy.detach().numpy().astype(np.float32), reference=reference)
    found, _ = credited(given, scores, AdvantageConfig(name="preference"), LossConfig(name="dpo", beta=0.7))
    (ours,) = torch.autograd.grad(-(torch.from_numpy(found.advantages) * policy)[mask].sum(), policy)

    def dpo(x: torch.Tensor) -> torch.Tensor:
        ratio = (x - torch.from_numpy(reference)) * mask
        return -torch.nn.functional.logsigmoid(0.7 * (ratio[:4].sum() - ratio[4:7].sum()))

    (theirs,) = torch.autograd.grad(dpo(policy), policy)
    assert torch.autograd.gradcheck(dpo, policy)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert not found.advantages[7:].any()


def test_half_a_pair_says_nothing() -> None:
    given = batch("preference", [1.0, 0.0], [[[0, 1, 0, 1]], [[0, 0, 0]]])
    found, _ = credited(
        given,
        Scores(policy=POLICY[:4], reference=REFERENCE[:4]),
        AdvantageConfig(name="preference"),
        LossConfig(name="dpo"),
    )
    assert not found.advantages.any()


def test_what_is_told_of_a_distillation_and_of_pairs() -> None:
    """The reverse KL is the mean of lp - lp_teacher; a pair's margin is beta times the chosen's log ratio less the rejected's."""
    taught = replace(batch("grpo", [1.0, 0.0]), teacher_logprobs=REFERENCE)
    scores = Scores(policy=POLICY, reference=REFERENCE)
    found = score_metrics(taught, scores, LossConfig(name="opd"))
    assert found == pytest.approx({"distillation/reverse_kl": (0.5 - 1 + 0 + 0.5) / 4})
    pair = score_metrics(batch("preference", [1.0, 0.0]), scores, LossConfig(name="dpo", beta=0.5))
    margin = 0.5 * ((0.5 - 1) - (0 + 0.5))
    assert pair == pytest.approx(
        {"preference/pairs": 1, "preference/loss": np.log(1 + np.exp(-margin)), "preference/margin": margin, "preference/accuracy": 0}
    )  # fmt: skip
    assert score_metrics(batch("preference", [1.0, 1.0]), scores, LossConfig(name="dpo")) == {"preference/pairs": 0}
    assert score_metrics(taught, scores, LossConfig()) == {}
