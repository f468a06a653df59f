"""Policy losses: hand-computed numbers, finite differences, and the learner's invariants 6 to 11 and 23."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from streams import UNCORRECTED, run, streams
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.trainer.config import CorrectionConfig
from rlagent.trainer.metrics import reduce
from rlagent.trainer.streams import LossInput
from rlagent.trainer.token_loss import TOKEN_LOSSES


def parts(s: LossInput, *cuts: slice) -> list[LossInput]:
    """The streams as microbatches."""
    fields = {name: getattr(s, name) for name in LossInput.__dataclass_fields__}
    return [
        LossInput(**{name: None if value is None else value[cut] for name, value in fields.items()}) for cut in cuts
    ]


def test_ppo_by_hand() -> None:
    # ratios e^0.2 = 1.2214, 1, e^-0.3 = 0.7408, e^-0.4 = 0.6703; clip to [0.8, 1.28]
    expected = 0.25 * (-math.exp(0.2) - 1 + 2 * 0.8 + 2 * 0.8)  # A < 0 below the clip: max(2 r, 2 * 0.8)
    assert run(streams()).loss.item() == pytest.approx(expected)


def test_clip_higher_by_hand() -> None:
    s = streams(old_logprobs=torch.tensor([-1.5, -0.5, -2.5, -0.7, -1.5], dtype=torch.float64))
    # the first ratio is e^0.5 = 1.6487, A = 1; the others are 1
    for high in (0.2, 0.28, 0.5):
        assert run(s, clip_high=high).loss.item() == pytest.approx(0.25 * (-(1 + high) - 1 + 2 + 2))
    assert run(s, clip_high=0.7).loss.item() == pytest.approx(0.25 * (-math.exp(0.5) - 1 + 2 + 2))


def test_dual_clip_by_hand() -> None:
    s = streams(old_logprobs=torch.tensor([-1.2, -0.5, -2.5, -3.7, -1.1], dtype=torch.float64))
    # the fourth ratio is e^3 = 20, A = -2: 2 r = 40.2 without, 2 * 3 with a dual clip of 3
    without, with_clip = run(s).loss.item(), run(s, dual_clip=3.0).loss.item()
    assert without - with_clip == pytest.approx(0.25 * (2 * math.exp(3) - 6))
    x = s.logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(run(replace(s, logprobs=x), dual_clip=3.0).loss, x)
    assert gradient[3] == 0


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    s = streams(advantages=torch.full((5,), 2.0, dtype=torch.float64))
    assert run(s, dual_clip=1.01).loss.item() == run(s).loss.item()


def test_cispo_and_reinforce_by_hand() -> None:
    ratios = [math.exp(0.2), 1.0, 0.8, 0.8]
    terms = zip(ratios, [1, 1, -2, -2], [-1.0, -0.5, -0.7, -1.5], strict=True)
    assert run(streams(), "cispo").loss.item() == pytest.approx(-0.25 * sum(r * a * lp for r, a, lp in terms))
    assert run(streams(), "reinforce").loss.item() == pytest.approx(-0.25 * (-1.0 - 0.5 + 1.4 + 3.0))


def test_gspo_by_hand() -> None:
    first, second = math.exp((0.2 + 0.0) / 2), math.exp((-0.3 - 0.4) / 2)
    expected = 0.25 * (2 * -first + 2 * max(2 * second, 2 * 0.8))
    assert run(streams(), "gspo").loss.item() == pytest.approx(expected)


EXTRAS: dict[str, tuple[dict[str, Any], CorrectionConfig]] = {
    "plain": ({}, UNCORRECTED),
    "dual_clip": ({"dual_clip": 1.05}, UNCORRECTED),
    "kl": ({"kl_coef": 0.3}, UNCORRECTED),
    "entropy": ({"entropy_coef": 0.2}, UNCORRECTED),
    "tis": ({}, CorrectionConfig(name="tis", level="sequence", high=1.05)),
    "all": ({"kl_coef": 0.3, "entropy_coef": 0.2}, CorrectionConfig(name="mis", level="geometric", veto=0.01)),
}


def objective(x: Tensor, name: str, extra: str, **changes: Any) -> Tensor:
    """The loss as a function of the logprobs; the entropy depends on them too, so that its gradient is checked."""
    options, c = EXTRAS[extra]
    reference = torch.tensor([-1.3, -0.2, 0.0, -0.9, -1.0], dtype=torch.float64)
    s = streams(logprobs=x, ref_logprobs=reference, entropy=x.square(), **changes)
    return run(s, name, c=c, **options).loss


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "gspo", "gmpo", "sapo", "reinforce", "sft"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_invariant_11_gradients_are_finite_differences(name: str, extra: str) -> None:
    # GSPO's token form differentiates to the same as its value, where a sequence has one advantage, weight and factor.
    x = streams().logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda lp: objective(lp, name, extra), x)


@pytest.mark.parametrize("extra", EXTRAS)
def test_invariant_11_cispo_is_reinforce_with_its_clipped_ratio_held_still(extra: str) -> None:
    s = streams()
    x = s.logprobs.clone().requires_grad_()
    held = (s.logprobs - s.old_logprobs).exp().clamp(0.8, 1.28) * s.advantages
    ours = torch.autograd.grad(objective(x, "cispo", extra), x)[0]
    theirs = torch.autograd.grad(objective(x, "reinforce", extra, advantages=held), x)[0]
    assert torch.allclose(ours, theirs)


@pytest.mark.parametrize("extra", EXTRAS)
def test_invariant_11_topr_is_reinforce_with_its_tapered_ratio_held_still(extra: str) -> None:
    s = streams()
    x = s.logprobs.clone().requires_grad_()
    taper = torch.tensor(
        [1, 1, 1, math.exp(-0.7), math.exp(-0.7)]
    )  # A > 0 keeps its weight; the second row's ratio is e^-0.7
    ours = torch.autograd.grad(objective(x, "topr", extra), x)[0]
    theirs = torch.autograd.grad(objective(x, "reinforce", extra, advantages=taper * s.advantages), x)[0]
    assert torch.allclose(ours, theirs)


def test_decoupled_ppo_and_sft_by_hand() -> None:
    ratios = [math.exp(0.2), 1.0, 0.8, 0.8]
    behaviour = [math.exp(-0.1), math.exp(0.1), 1.0, math.exp(0.2)]
    terms = zip(ratios, behaviour, [1, 1, -2, -2], strict=True)
    assert run(streams(), "decoupled_ppo").loss.item() == pytest.approx(-0.25 * sum(r * w * a for r, w, a in terms))
    assert run(streams(), "sft").loss.item() == pytest.approx(0.25 * (1.0 + 0.5 + 0.7 + 1.5))


def test_gmpo_sapo_and_topr_by_hand() -> None:
    # GMPO: the first row's log ratios are 0.2 and 0; the second's -0.3 and -0.4, each held at log 0.8 as A < 0.
    assert run(streams(), "gmpo").loss.item() == pytest.approx(0.25 * (2 * -math.exp(0.1) + 2 * 2 * 0.8))
    gates = [
        4 / tau / (1 + math.exp(-tau * (math.exp(d) - 1))) for tau, d in ((1, 0.2), (1, 0), (1.05, -0.3), (1.05, -0.4))
    ]
    expected = -0.25 * sum(a * gate for a, gate in zip([1, 1, -2, -2], gates, strict=True))
    assert run(streams(), "sapo").loss.item() == pytest.approx(expected)
    taper = math.exp(-0.7)
    assert run(streams(), "topr").loss.item() == pytest.approx(-0.25 * (-1.5 + taper * 2 * (0.7 + 1.5)))


def test_gradients_of_cispo_and_gspo_by_hand() -> None:
    x = streams().logprobs.clone().requires_grad_()
    (cispo,) = torch.autograd.grad(run(streams(logprobs=x), "cispo").loss, x)
    assert cispo.tolist() == pytest.approx([-0.25 * math.exp(0.2), -0.25, 0, 0.25 * 2 * 0.8, 0.25 * 2 * 0.8])
    (gspo,) = torch.autograd.grad(run(streams(logprobs=x), "gspo").loss, x)
    assert gspo.tolist() == pytest.approx([-0.25 * math.exp(0.1), -0.25 * math.exp(0.1), 0, 0, 0])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_invariants_6_and_7_what_is_masked_does_not_matter(name: str) -> None:
    clean = streams(ref_logprobs=torch.zeros(5, dtype=torch.float64), entropy=torch.ones(5, dtype=torch.float64))
    nan = torch.where(clean.loss_mask, 0.0, torch.nan)
    x = (clean.logprobs + nan).requires_grad_()
    entropy = (torch.ones(5, dtype=torch.float64) + nan).requires_grad_()
    dirty = replace(
        clean, logprobs=x, old_logprobs=clean.old_logprobs + nan, rollout_logprobs=clean.rollout_logprobs + nan,
        ref_logprobs=nan, entropy=entropy, advantages=clean.advantages + nan, weight=clean.weight + nan,
    )  # fmt: skip
    options = {"kl_coef": 0.1, "entropy_coef": 0.1}
    c = CorrectionConfig(name="mis", level="geometric", veto=0.01)
    found = run(dirty, name, c=c, **options)
    assert found.loss.item() == run(clean, name, c=c, **options).loss.item()
    for gradient in torch.autograd.grad(found.loss, (x, entropy)):
        assert gradient[2].item() == 0
        assert gradient.isfinite().all()
    assert all(value.isfinite() for value in found.stats.values())


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_invariant_23_a_microbatch_without_sampled_tokens(name: str) -> None:
    x = streams().logprobs.clone().requires_grad_()
    s = streams(logprobs=x, ref_logprobs=x.detach(), entropy=x.exp(), loss_mask=torch.zeros(5, dtype=torch.bool))
    c = CorrectionConfig(name="tis", level="geometric", veto=0.1)
    found = run(s, name, c=c, kl_coef=0.1, entropy_coef=0.1)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert found.loss.item() == 0
    assert x.grad is not None
    assert x.grad.tolist() == [0] * 5
    assert {key: value.item() for key, value in found.stats.items()} == dict.fromkeys(found.stats, 0)


def test_invariant_9_the_first_on_policy_step_has_ratio_one() -> None:
    s = streams(old_logprobs=streams().logprobs.clone())
    metrics = reduce(run(s).stats, 4)
    assert (metrics["policy/ratio_mean"], metrics["policy/ratio_max"], metrics["policy/approx_kl"]) == (1.0, 1.0, 0.0)
    assert (metrics["policy/clip_low"], metrics["policy/clip_high"]) == (0.0, 0.0)


def test_invariant_9_at_ratio_one_every_loss_has_the_gradient_of_reinforce() -> None:
    gradients = []
    for name in TOKEN_LOSSES.keys() - {"decoupled_ppo", "sft"}:
        x = streams().logprobs.clone().requires_grad_()
        gradients.append(torch.autograd.grad(run(streams(logprobs=x, old_logprobs=x.detach()), name).loss, x)[0])
    assert all(torch.allclose(gradient, gradients[0]) for gradient in gradients)
    assert gradients[0].tolist() == pytest.approx([-0.25, -0.25, 0, 0.5, 0.5])


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize(
    ("advantage", "shift", "bound"), [(1.0, 1.0, True), (1.0, -1.0, False), (-1.0, -1.0, True), (-1.0, 1.0, False)]
)
def test_invariant_10_clipping_binds_only_where_it_should(
    name: str, advantage: float, shift: float, bound: bool
) -> None:
    s = streams()
    x = (s.old_logprobs + shift).requires_grad_()
    found = run(replace(s, logprobs=x, advantages=torch.full((5,), advantage, dtype=torch.float64)), name)
    (gradient,) = torch.autograd.grad(found.loss, x)
    assert (gradient[s.loss_mask] == 0).all().item() is bound
    metrics = reduce(found.stats, 4)
    assert metrics["policy/clip_low"] == (bound and shift < 0)
    assert metrics["policy/clip_high"] == (bound and shift > 0)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_invariant_2_microbatches_sum_to_the_step(name: str) -> None:
    s = streams(ref_logprobs=torch.zeros(5, dtype=torch.float64))
    whole = run(s, name, kl_coef=0.1)
    found = [run(part, name, kl_coef=0.1) for part in parts(s, slice(0, 3), slice(3, 5))]
    assert sum(part.loss.item() for part in found) == pytest.approx(whole.loss.item())
    for key, value in whole.stats.items():
        combine = max if key.startswith("max:") else sum
        assert combine(part.stats[key].item() for part in found) == pytest.approx(value.item()), key


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("shift", [1e3, -1e3])
def test_an_absurd_ratio_makes_no_nan(name: str, advantage: float, shift: float) -> None:
    old = streams().old_logprobs.float()
    x = (old + torch.tensor([shift, 0, 0, 0, 0])).requires_grad_()
    given = streams(
        logprobs=x, old_logprobs=old, rollout_logprobs=old, advantages=torch.full((5,), advantage), weight=old.exp()
    )
    found = run(given, name, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(found.loss, x)
    assert found.loss.isfinite()
    assert gradient.isfinite().all()


def test_the_entropy_bonus_lowers_the_loss() -> None:
    s = streams(entropy=torch.tensor([1.0, 2.0, 9.0, 3.0, 4.0], dtype=torch.float64))
    found = run(s, entropy_coef=0.1)
    assert (found.loss - run(s).loss).item() == pytest.approx(-0.1 * 0.25 * 10)
    assert reduce(found.stats, 4)["policy/entropy"] == pytest.approx(2.5)


def test_a_loss_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(s, config):\n    return -s.logprobs / 2\ndef bad(s, config):\n    return s.logprobs.sum()\n"
    )
    assert run(streams(), f"{tmp_path}/mine.py:half").loss.item() == pytest.approx(0.25 * (1 + 0.5 + 0.7 + 1.5) / 2)
    with pytest.raises(LearnerError, match="shape"):
        run(streams(), f"{tmp_path}/mine.py:bad")
