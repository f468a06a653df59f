"""Losses, KL and corrections: hand-computed numbers, finite differences, and the learner's invariants 6 to 11, 19 to 21."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.correction import correction
from rlagent.trainer.kl import KL_ESTIMATORS
from rlagent.trainer.loss import LOSSES, LossInput, policy_loss
from rlagent.trainer.metrics import reduce

NONE = CorrectionConfig()


def streams(**given: Any) -> LossInput:
    """Five tokens of two sequences, the third masked out."""
    made: dict[str, Any] = {
        "logprobs": torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.5], dtype=torch.float64),
        "old_logprobs": torch.tensor([-1.2, -0.5, -2.5, -0.4, -1.1], dtype=torch.float64),
        "rollout_logprobs": torch.tensor([-1.1, -0.6, -2.5, -0.4, -1.3], dtype=torch.float64),
        "ref_logprobs": None,
        "entropy": None,
        "advantages": torch.tensor([1.0, 1.0, 0.0, -2.0, -2.0], dtype=torch.float64),
        "weight": torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25], dtype=torch.float64),
        "loss_mask": torch.tensor([True, True, False, True, True]),
        "sequence_index": torch.tensor([0, 0, 0, 1, 1]),
        **given,
    }
    return LossInput(**{key: made[key] for key in LossInput.__dataclass_fields__ if key in made})


def run(s: LossInput, name: str = "ppo", *, c: CorrectionConfig = NONE, **options: Any) -> Any:
    return policy_loss(s, LossConfig(name=name, **options), c)


def test_ppo_by_hand() -> None:
    # ratios e^0.2 = 1.2214, 1, e^-0.3 = 0.7408, e^-0.4 = 0.6703; clip to [0.8, 1.28]
    expected = 0.25 * (-math.exp(0.2) - 1 + 2 * 0.8 + 2 * 0.8)  # A < 0 below the clip: max(2 r, 2 * 0.8)
    assert run(streams()).loss.item() == pytest.approx(expected)


def test_dual_clip_by_hand() -> None:
    s = streams(old_logprobs=torch.tensor([-1.2, -0.5, -2.5, -3.7, -1.1], dtype=torch.float64))
    # the fourth ratio is e^3 = 20: max(2 r, ...) = 40.2 without, 2 * 3 with a dual clip of 3
    without, with_clip = run(s).loss.item(), run(s, dual_clip=3.0).loss.item()
    assert without - with_clip == pytest.approx(0.25 * (2 * math.exp(3) - 6))


def test_cispo_and_reinforce_by_hand() -> None:
    ratios = [math.exp(0.2), 1.0, 0.8, 0.8]
    terms = zip(ratios, [1, 1, -2, -2], [-1.0, -0.5, -0.7, -1.5], strict=True)
    assert run(streams(), "cispo").loss.item() == pytest.approx(-0.25 * sum(r * a * lp for r, a, lp in terms))
    assert run(streams(), "reinforce").loss.item() == pytest.approx(-0.25 * (-1.0 - 0.5 + 1.4 + 3.0))


def test_gspo_by_hand() -> None:
    first, second = math.exp((0.2 + 0.0) / 2), math.exp((-0.3 - 0.4) / 2)
    expected = 0.25 * (2 * -first + 2 * max(2 * second, 2 * 0.8))
    assert run(streams(), "gspo").loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extra", ["plain", "kl", "entropy", "tis"])
def test_invariant_11_gradients_are_finite_differences(name: str, extra: str) -> None:
    options: dict[str, Any] = {"kl": {"kl_coef": 0.3}, "entropy": {"entropy_coef": 0.2}}.get(extra, {})
    c = CorrectionConfig(name="tis", high=1.05) if extra == "tis" else NONE
    base = streams(ref_logprobs=torch.tensor([-1.3, -0.2, 0.0, -0.9, -1.0], dtype=torch.float64))

    def loss(logprobs: Tensor) -> Tensor:
        # An entropy that depends on the logprobs, so that its gradient is checked too.
        entropy = logprobs.square() if extra == "entropy" else None
        found: Tensor = run(replace(base, logprobs=logprobs, entropy=entropy), name, c=c, **options).loss
        return found

    x = base.logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    if name in ("cispo", "gspo"):  # the clipped ratio is a constant to the gradient, not to a difference
        assert gradient[2] == 0
        assert gradient.isfinite().all()
        return
    for i in range(5):
        step = torch.zeros(5, dtype=torch.float64)
        step[i] = 1e-6
        assert gradient[i].item() == pytest.approx(((loss(x + step) - loss(x - step)) / 2e-6).item(), abs=1e-5)


def test_gradients_of_cispo_and_gspo_by_hand() -> None:
    x = streams().logprobs.clone().requires_grad_()
    (cispo,) = torch.autograd.grad(run(streams(logprobs=x), "cispo").loss, x)
    assert cispo.tolist() == pytest.approx([-0.25 * math.exp(0.2), -0.25, 0, 0.25 * 2 * 0.8, 0.25 * 2 * 0.8])
    (gspo,) = torch.autograd.grad(run(streams(logprobs=x), "gspo").loss, x)
    assert gspo.tolist() == pytest.approx([-0.25 * math.exp(0.1), -0.25 * math.exp(0.1), 0, 0, 0])


@pytest.mark.parametrize("name", LOSSES)
def test_invariants_6_and_7_what_is_masked_does_not_matter(name: str) -> None:
    clean = streams(ref_logprobs=torch.zeros(5, dtype=torch.float64), entropy=torch.ones(5, dtype=torch.float64))
    nan = torch.where(clean.loss_mask, 0.0, torch.nan)
    x = (clean.logprobs + nan).requires_grad_()
    dirty = replace(
        clean, logprobs=x, old_logprobs=clean.old_logprobs + nan, rollout_logprobs=clean.rollout_logprobs + nan,
        ref_logprobs=nan, entropy=torch.ones(5, dtype=torch.float64) + nan, advantages=clean.advantages + nan,
    )  # fmt: skip
    options = {"kl_coef": 0.1, "entropy_coef": 0.1}
    found = run(dirty, name, c=CorrectionConfig(name="mis"), **options)
    assert found.loss.item() == run(clean, name, c=CorrectionConfig(name="mis"), **options).loss.item()
    (gradient,) = torch.autograd.grad(found.loss, x)
    assert gradient[2].item() == 0
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in found.stats.values())


def test_invariant_9_the_first_on_policy_step_has_ratio_one() -> None:
    s = streams(old_logprobs=streams().logprobs.clone())
    metrics = reduce(run(s).stats, 4)
    assert (metrics["policy/ratio_mean"], metrics["policy/ratio_max"], metrics["policy/approx_kl"]) == (1.0, 1.0, 0.0)
    assert (metrics["policy/clip_low"], metrics["policy/clip_high"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("advantage", "shift", "bound"), [(1.0, 1.0, True), (1.0, -1.0, False), (-1.0, -1.0, True), (-1.0, 1.0, False)]
)
def test_invariant_10_clipping_binds_only_where_it_should(advantage: float, shift: float, bound: bool) -> None:
    s = streams()
    x = (s.old_logprobs + shift).requires_grad_()
    (gradient,) = torch.autograd.grad(
        run(replace(s, logprobs=x, advantages=torch.full((5,), advantage, dtype=torch.float64))).loss, x
    )
    assert (gradient[s.loss_mask] == 0).all().item() is bound


def test_microbatches_sum_to_the_step() -> None:
    s = streams(ref_logprobs=torch.zeros(5, dtype=torch.float64))
    whole = run(s, kl_coef=0.1)
    parts = [
        run(
            LossInput(**{k: None if (v := getattr(s, k)) is None else v[part] for k in LossInput.__dataclass_fields__}),
            kl_coef=0.1,
        )
        for part in (slice(0, 2), slice(2, 5))
    ]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item())
    for key, value in whole.stats.items():
        combine = max if key.startswith("max:") else sum
        assert combine(p.stats[key].item() for p in parts) == pytest.approx(value.item()), key


def test_invariant_19_kl() -> None:
    zero = torch.zeros(4)
    d = torch.tensor([-1.5, -0.1, 0.2, 2.0])
    for name, estimate in KL_ESTIMATORS.items():
        assert estimate(zero).tolist() == [0, 0, 0, 0], name
    assert (KL_ESTIMATORS["k3"](d) >= 0).all()
    assert torch.equal(KL_ESTIMATORS["k3_unbiased"](d), KL_ESTIMATORS["k3"](d))


def test_invariant_19_the_gradient_of_k2_is_the_exact_kls_in_expectation() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.1], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)

    def expected_gradient(name: str) -> Tensor:
        total = torch.zeros(3, dtype=torch.float64)
        for token in range(3):
            value = KL_ESTIMATORS[name](reference[token] - logp[token])
            total += logp[token].exp().detach() * torch.autograd.grad(value, logits, retain_graph=True)[0]
        return total

    assert torch.allclose(expected_gradient("k2"), exact)
    assert torch.allclose(expected_gradient("k3_unbiased"), exact)
    assert not torch.allclose(expected_gradient("k3"), exact)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_invariant_20_no_mismatch_no_correction(name: str, level: Any) -> None:
    s = streams(rollout_logprobs=streams().old_logprobs.clone())
    assert run(s, c=CorrectionConfig(name=name, level=level)).loss.item() == run(s).loss.item()


def test_corrections_by_hand() -> None:
    log_w = torch.tensor([math.log(4), 0.0, 0.0, math.log(0.1), 0.0])
    mask, index = streams().loss_mask, streams().sequence_index

    def factors(**given: Any) -> list[float]:
        found = correction(log_w, mask, index, CorrectionConfig(**given))
        assert found is not None
        return found.tolist()

    assert factors(name="tis") == pytest.approx([2, 1, 1, 0.1, 1])
    assert factors(name="mis") == pytest.approx([0, 1, 1, 0, 1])
    assert factors(name="mis", level="sequence") == pytest.approx([0, 0, 0, 0, 0])
    root = math.sqrt(0.1)
    assert factors(name="tis", level="geometric") == pytest.approx([2, 2, 2, root, root])
    assert factors(veto=0.5) == pytest.approx([1, 1, 1, 0, 0])
    with pytest.raises(LearnerError, match="icepopp"):
        correction(log_w, mask, index, CorrectionConfig(name="icepopp"))


def test_invariant_21_rejected_tokens_stay_in_the_denominator() -> None:
    # Weights are 1/N of the step's sampled tokens; a rejected token adds 0 to the numerator and keeps its place in N.
    s = streams(rollout_logprobs=torch.tensor([-9.0, -0.5, 0.0, -0.4, -1.1], dtype=torch.float64))
    found = run(s, "reinforce", c=CorrectionConfig(name="mis"))
    assert found.loss.item() == pytest.approx(-0.25 * (-0.5 + 1.4 + 3.0))
    assert reduce(found.stats, 4)["policy/correction_rejected"] == 0.25


def test_mismatch_metrics_by_hand() -> None:
    metrics = reduce(run(streams()).stats, 4)
    gaps = [0.1, -0.1, 0.0, -0.2]  # lp_roll - lp_old
    w = [math.exp(-g) for g in gaps]
    assert metrics["mismatch/kl"] == pytest.approx(sum(gaps) / 4)
    assert metrics["mismatch/abs_mean"] == pytest.approx(0.1)
    assert metrics["mismatch/abs_max"] == pytest.approx(0.2)
    assert metrics["mismatch/k3"] == pytest.approx(sum(x - 1 + g for x, g in zip(w, gaps, strict=True)) / 4)
    assert metrics["mismatch/chi2"] == pytest.approx(sum(x * x for x in w) / 4 - 1)
    mean = sum(w) / 4
    assert metrics["mismatch/ess"] == pytest.approx(1 / (sum((x / mean) ** 2 for x in w) / 4))


def test_a_loss_by_path(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(s, config):\n    return -s.logprobs / 2\ndef bad(s, config):\n    return s.logprobs.sum()\n"
    )
    assert run(streams(), f"{tmp_path}/mine.py:half").loss.item() == pytest.approx(0.25 * (1 + 0.5 + 0.7 + 1.5) / 2)
    with pytest.raises(LearnerError, match="shape"):
        run(streams(), f"{tmp_path}/mine.py:bad")
