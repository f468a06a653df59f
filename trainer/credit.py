"""Credit that needs scores: advantages from the critic's values, a teacher's or the reference's logprobs.

In the flow: learner.py scores the batch before a step's updates and passes [N] arrays; all ranks compute the same, so no layout changes
anything. Pure: a batch in, a batch out. All scores are 0 outside the mask.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32

from rlagent.errors import LearnerError
from rlagent.kernels.gae import gae_packed
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.trainer.kl import KL_ESTIMATORS
from rlagent.types import Batch, Float32Array

FloatArray = npt.NDArray[np.float64]
# One number for each token of the batch.
BatchTokens = Float32[Float32Array, " tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the models say of a batch's sampled tokens before its updates; None where it is not needed."""

    policy: BatchTokens | None = None
    reference: BatchTokens | None = None
    values: BatchTokens | None = None


def credited(
    batch: Batch, scores: Scores, advantage: AdvantageConfig, loss: LossConfig
) -> tuple[Batch, BatchTokens | None]:
    """The batch with its final advantages, and the returns that a critic is to learn."""
    batch = kl_in_reward(batch, scores, advantage, loss)
    returns = None
    if advantage.name == "gae":
        batch, returns = gae(batch, scores, advantage)
    if loss.name == "opd":
        batch = distilled(batch, scores)
    if loss.name == "dpo":
        batch = preferred(batch, scores, loss.beta)
    return batch, returns


def kl_in_reward(batch: Batch, scores: Scores, advantage: AdvantageConfig, loss: LossConfig) -> Batch:
    """Each token pays coef * KL estimate; in the advantages as the discounted sum of what it and those after it pay."""
    if loss.kl_in != "reward" or not loss.kl_coef:
        return batch
    assert scores.policy is not None
    assert scores.reference is not None
    estimate = KL_ESTIMATORS[loss.kl_estimator](torch.from_numpy(scores.reference - scores.policy)).numpy()
    paid = np.where(batch.loss_mask, loss.kl_coef * estimate, 0).astype(np.float32)
    if advantage.name == "gae":
        assert batch.rewards is not None
        return replace(batch, rewards=batch.rewards - paid)
    # With V = 0 and lambda = 1 the estimate is the discounted sum of rewards.
    total, _ = _gae(batch, paid, np.zeros_like(paid), advantage.gamma, 1.0)
    return replace(batch, advantages=batch.advantages - total)


def gae(batch: Batch, scores: Scores, config: AdvantageConfig) -> tuple[Batch, BatchTokens]:
    """Generalised advantages (arXiv 1506.02438), whitened if asked for; returns = A + V from before that.

    Once every rollout succeeds, what is left of the advantages is the critic's error. Divided by its own deviation it would have
    the size of a reward, and the optimizer would follow it: so whitening divides by `min_deviation` at least, and never enlarges
    what is small (as DreamerV3 scales returns by max(1, their range), arXiv 2301.04104).
    """
    assert scores.values is not None
    if batch.rewards is None:
        raise LearnerError(
            "learner.advantage.name = 'gae', but the batch has no rewards by token; pack it with that setting"
        )
    found, returns = _gae(batch, batch.rewards, scores.values, config.gamma, config.lam)
    sampled = found[batch.loss_mask]
    if config.whiten and len(sampled) > 1:
        deviation = max(float(sampled.std()) + config.epsilon, config.min_deviation)
        found = (found - sampled.mean()) / deviation if deviation else np.zeros_like(found)
    return replace(batch, advantages=np.where(batch.loss_mask, found, 0).astype(np.float32)), returns


def distilled(batch: Batch, scores: Scores) -> Batch:
    """A = lp_teacher - lp: the negative reverse KL by token (on-policy distillation, arXiv 2306.13649)."""
    assert scores.policy is not None
    if batch.teacher_logprobs is None:
        raise LearnerError(
            "learner.loss.name = 'opd', but the batch has no logprobs of a teacher; set learner.teacher.url"
        )
    difference = np.where(batch.loss_mask, batch.teacher_logprobs - scores.policy, 0)
    return replace(batch, advantages=difference.astype(np.float32))


def preferred(batch: Batch, scores: Scores, beta: float) -> Batch:
    """DPO (arXiv 2305.18290, eq. 7) as REINFORCE: A = +-beta sigmoid(-margin) has the gradient of -log sigmoid(margin).

    The sign comes with the batch: +1 chosen, -1 rejected. With more than one update a step the margin is that of its start.
    """
    group, sign, margin, whole = _pairs(batch, scores, beta)
    strength = np.where(whole, beta / (1 + np.exp(margin)), 0.0)
    return replace(batch, advantages=(sign * strength[group]).astype(np.float32))


def _pairs(
    batch: Batch, scores: Scores, beta: float
) -> tuple[npt.NDArray[np.int64], FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Of each token its group and sign [N]; of each group its margin, and whether it is a pair of two that have rows [G].

    margin = beta (log ratio of the chosen rollout to the reference - that of the rejected).
    """
    assert scores.policy is not None
    assert scores.reference is not None
    assert batch.group_index is not None
    group = np.repeat(batch.group_index, np.diff(batch.cu_seqlens)).astype(np.int64)
    sign = np.sign(batch.advantages).astype(np.float64)
    size = int(batch.group_index.max(initial=-1)) + 1
    difference = (scores.policy.astype(np.float64) - scores.reference) * batch.loss_mask
    margin: FloatArray = np.asarray(beta * np.bincount(group, weights=sign * difference, minlength=size))
    whole = np.array([{-1.0, 1.0} <= set(sign[group == number].tolist()) for number in range(size)], dtype=bool)
    return group, sign, margin, whole


def score_metrics(batch: Batch, scores: Scores, loss: LossConfig) -> dict[str, float]:
    """What the step's start looks like to the loss itself: opd's reverse KL, dpo's loss and margins. `batch` is from before `credited`."""
    if loss.name == "opd":
        assert scores.policy is not None
        assert batch.teacher_logprobs is not None
        gap = (scores.policy - batch.teacher_logprobs)[batch.loss_mask]
        return {"distillation/reverse_kl": float(gap.mean())} if len(gap) else {}
    if loss.name == "dpo":
        _, _, margins, whole = _pairs(batch, scores, loss.beta)
        margin = margins[whole]
        found = {"preference/pairs": float(len(margin))}
        if len(margin):
            found["preference/loss"] = float(np.logaddexp(0, -margin).mean())
            found["preference/margin"] = float(margin.mean())
            found["preference/accuracy"] = float((margin > 0).mean())
        return found
    return {}


def _gae(
    batch: Batch, rewards: BatchTokens, values: BatchTokens, gamma: float, lam: float
) -> tuple[BatchTokens, BatchTokens]:
    reward, value, mask = (torch.from_numpy(np.ascontiguousarray(x)) for x in (rewards, values, batch.loss_mask))
    found = gae_packed(reward, value, mask, torch.from_numpy(batch.cu_seqlens), gamma, lam)
    advantage, returns = (tensor.numpy().astype(np.float32) for tensor in found)
    return advantage, returns
