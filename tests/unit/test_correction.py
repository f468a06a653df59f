"""Corrections of the engine/learner mismatch: hand-computed factors, invariants 20 and 21, and no split of rows matters."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from groups import group
from pydantic import ValidationError
from streams import run, streams
from torch import Tensor

from rlagent.trainer.batch import pack
from rlagent.trainer.config import AdvantageConfig, CorrectionConfig, LossConfig, ParallelConfig
from rlagent.trainer.correction import correction
from rlagent.trainer.loss import policy_loss
from rlagent.trainer.metrics import reduce
from rlagent.trainer.microbatch import make_microbatch
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.streams import LossInput
from rlagent.types import Batch

LOG_W = torch.tensor([math.log(4), 0.0, 0.0, math.log(0.1), 0.0], dtype=torch.float64)
ROOT = math.sqrt(0.1)


def factors(log_w: Tensor = LOG_W, **given: Any) -> list[float]:
    s = streams()
    found = correction(log_w, s.loss_mask, s.sequence_index, CorrectionConfig(**given))
    assert found is not None
    values: list[float] = found.tolist()
    return values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"name": "tis"}, [2, 1, 1, 0.1, 1]),
        ({"name": "mis"}, [0, 1, 1, 0, 1]),
        ({"name": "icepop", "low": 0.05}, [0, 1, 1, 0.1, 1]),
        ({"name": "tis", "level": "sequence", "high": 5}, [4, 4, 4, 0.1, 0.1]),
        ({"name": "mis", "level": "sequence"}, [0, 0, 0, 0, 0]),
        ({"name": "tis", "level": "geometric"}, [2, 2, 2, ROOT, ROOT]),  # sqrt(4 * 1): the masked token is not counted
        ({"name": "mis", "level": "geometric"}, [2, 2, 2, 0, 0]),  # the bounds themselves are kept
        ({"veto": 0.5}, [1, 1, 1, 0, 0]),
        ({"name": "tis", "veto": 0.05}, [2, 1, 1, 0.1, 1]),
        ({"name": "tis", "veto": 0.5}, [2, 1, 1, 0, 0]),
    ],
)
def test_factors_by_hand(given: dict[str, Any], expected: list[float]) -> None:
    assert factors(**given) == pytest.approx(expected)


def test_the_bounds_of_masking_are_inclusive() -> None:
    assert factors(torch.tensor([0.5, 2.0, 1.0, 0.49, 2.01]).log(), name="mis") == pytest.approx([0.5, 2, 1, 0, 0])


def test_nothing_to_correct_and_unknown_names() -> None:
    s = streams()
    assert correction(LOG_W, s.loss_mask, s.sequence_index, CorrectionConfig()) is None
    with pytest.raises(ValidationError, match=r"'icepopp' is unknown; known: none, tis, mis, icepop"):
        CorrectionConfig(name="icepopp")


def test_a_factor_is_a_constant_to_the_gradient() -> None:
    s = streams()
    x = s.logprobs.clone().requires_grad_()
    plain = torch.autograd.grad(run(replace(s, logprobs=x), "reinforce").loss, x)[0]
    tempered = torch.autograd.grad(
        run(replace(s, logprobs=x), "reinforce", c=CorrectionConfig(name="tis", high=1.0)).loss, x
    )[0]
    w = (s.old_logprobs - s.rollout_logprobs).exp().clamp(max=1.0)
    assert torch.allclose(tempered, torch.where(s.loss_mask, plain * w, 0.0))
    for level in ("token", "sequence", "geometric"):
        c = CorrectionConfig(name="tis", level=level, veto=0.5)  # type: ignore[arg-type]
        factor = correction(LOG_W.clone().requires_grad_(), s.loss_mask, s.sequence_index, c)
        assert factor is not None
        assert not factor.requires_grad


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "none"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_invariant_20_no_mismatch_no_correction(name: str, level: Any) -> None:
    s = streams(rollout_logprobs=streams().old_logprobs.clone())
    found = run(s, c=CorrectionConfig(name=name, level=level, veto=0.9))
    assert found.loss.item() == run(s).loss.item()
    assert found.stats["correction_rejected"] == 0


def test_invariant_21_rejected_tokens_stay_in_the_denominator() -> None:
    # Weights are 1/N of the step's sampled tokens; a rejected token adds 0 to the numerator and keeps its place in N.
    s = streams(rollout_logprobs=torch.tensor([-9.0, -0.5, 0.0, -0.4, -1.1], dtype=torch.float64))
    found = run(s, "reinforce", c=CorrectionConfig(name="mis"))
    assert found.loss.item() == pytest.approx(-0.25 * (-0.5 + 1.4 + 3.0))
    assert reduce(found.stats, 4)["policy/correction_rejected"] == 0.25


def test_a_correction_leaves_kl_and_entropy_alone() -> None:
    s = streams(
        rollout_logprobs=torch.full((5,), -30.0, dtype=torch.float64),  # every token is rejected
        ref_logprobs=torch.zeros(5, dtype=torch.float64),
        entropy=torch.ones(5, dtype=torch.float64),
    )
    found = run(s, c=CorrectionConfig(name="mis"), kl_coef=0.1, kl_estimator="k1", entropy_coef=0.5).loss.item()
    assert found == pytest.approx(0.25 * (0.1 * (-1.0 - 0.5 - 0.7 - 1.5) - 0.5 * 4))


def test_a_product_over_a_long_sequence_overflows_to_the_bound() -> None:
    log_w = torch.full((5,), 60.0, dtype=torch.float32)  # e^240 is no float32
    assert factors(log_w, name="tis", level="sequence") == [2, 2, 2, 2, 2]
    assert factors(log_w, name="mis", level="sequence") == [0, 0, 0, 0, 0]


ONE_PROCESS = ParallelPlan(
    config=ParallelConfig(), rank=0, world_size=1, device=torch.device("cpu"), tensor_rank=0, pipeline_rank=0,
    context_rank=0, data_rank=0, expert_rank=0, expert_data_rank=0, tensor_group=None, pipeline_group=None,
    context_group=None, data_group=None,
)  # fmt: skip


def total(batch: Batch, cut: list[list[int]], logprobs: Tensor, config: LossConfig, c: CorrectionConfig) -> float:
    """The step's loss over these microbatches; logprobs [N] stand for the model."""
    found = 0.0
    for rows in cut:
        made = make_microbatch(batch, rows, ONE_PROCESS, torch.ones(1), torch.float32)
        lp = logprobs[torch.from_numpy(made.origin)]
        fields = {name: getattr(made.streams, name) for name in made.streams.__dataclass_fields__}
        s = LossInput(logprobs=lp, old_logprobs=lp - 0.1, ref_logprobs=None, entropy=None, **fields)
        found += policy_loss(s, config, c).loss.item()
    return found


@pytest.mark.parametrize(
    ("loss", "c"),
    [
        ("gspo", CorrectionConfig()),
        ("reinforce", CorrectionConfig(name="tis", level="sequence", high=3.0)),
        ("reinforce", CorrectionConfig(name="mis", level="geometric", low=0.8, high=1.2)),
        ("ppo", CorrectionConfig(veto=0.6)),
    ],
)
def test_invariant_2_rows_of_one_rollout_may_land_in_different_microbatches(loss: str, c: CorrectionConfig) -> None:
    masks = [[[0, 1, 1], [0, 1, 1, 1], [0, 1]], [[0, 1, 1, 0, 1]]]
    groups = [group([1.0, 0.0], rows=masks, name="a"), group([0.0, 1.0], rows=masks, name="b")]
    config = LossConfig(name=loss, aggregation="seq_mean_token_mean")
    batch = pack(groups, advantage=AdvantageConfig(name="dr_grpo"), loss=config, max_row_tokens=100).batch
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.4, batch.num_tokens).astype(np.float32)
    batch = replace(batch, rollout_logprobs=np.where(batch.loss_mask, noise - 1, 0).astype(np.float32))
    logprobs = torch.from_numpy(rng.normal(-1, 0.4, batch.num_tokens).astype(np.float32))
    whole = total(batch, [list(range(8))], logprobs, config, c)
    assert total(batch, [[0, 4], [1, 2, 7], [3, 5], [6]], logprobs, config, c) == pytest.approx(whole, rel=1e-5)
    assert total(batch, [[row] for row in range(8)], logprobs, config, c) == pytest.approx(whole, rel=1e-5)
    uncorrected = total(batch, [list(range(8))], logprobs, LossConfig(name="reinforce"), CorrectionConfig())
    assert whole != pytest.approx(uncorrected, rel=1e-3)  # the rule did act
