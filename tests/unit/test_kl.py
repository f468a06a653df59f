"""KL estimators: hand-computed numbers and the learner's invariant 19."""

import math

import pytest
import torch
from streams import run, streams
from torch import Tensor

from rlagent.trainer.kl import KL_ESTIMATORS
from rlagent.trainer.metrics import reduce


def test_values_by_hand() -> None:
    d = torch.tensor([0.5, -1.0], dtype=torch.float64)  # lp_ref - lp
    expected = {
        "k1": [-0.5, 1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(0.5) - 1.5, math.exp(-1)],
        "k3_unbiased": [math.exp(0.5) - 1.5, math.exp(-1)],
    }
    assert expected.keys() == KL_ESTIMATORS.keys()
    for name, values in expected.items():
        assert KL_ESTIMATORS[name](d).tolist() == pytest.approx(values), name


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_invariant_19_zero_where_the_policy_is_the_reference(name: str) -> None:
    d = torch.zeros(4, requires_grad=True)
    value = KL_ESTIMATORS[name](d)
    assert value.tolist() == [0, 0, 0, 0]
    (gradient,) = torch.autograd.grad(value.sum(), d)
    assert gradient.tolist() == ([-1] * 4 if name == "k1" else [0] * 4)


def test_invariant_19_k3_is_never_negative() -> None:
    assert (KL_ESTIMATORS["k3"](torch.linspace(-20, 20, 401, dtype=torch.float64)) >= 0).all()


def distributions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits and logprobs of a policy, logprobs of a reference, and the exact KL between them."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.1], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    return logits, logp, reference, (logp.exp() * (logp - reference)).sum()


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True), ("k3_unbiased", True)])
def test_invariant_19_which_values_are_unbiased(name: str, unbiased: bool) -> None:
    _, logp, reference, exact = distributions()
    mean = (logp.exp() * KL_ESTIMATORS[name](reference - logp)).sum()
    assert torch.allclose(mean, exact) is unbiased


@pytest.mark.parametrize(("name", "unbiased"), [("k1", False), ("k2", True), ("k3", False), ("k3_unbiased", True)])
def test_invariant_19_which_gradients_are_the_exact_kls_in_expectation(name: str, unbiased: bool) -> None:
    logits, logp, reference, exact = distributions()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    found = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        value = KL_ESTIMATORS[name](reference[token] - logp[token])
        found += logp[token].exp().detach() * torch.autograd.grad(value, logits, retain_graph=True)[0]
    assert torch.allclose(found, wanted) is unbiased


def test_the_loss_adds_it_with_its_coefficient_and_reports_the_plain_mean() -> None:
    reference = torch.tensor([-0.5, -0.5, 9.0, -0.7, -2.5], dtype=torch.float64)  # d = 0.5, 0, masked, 0, -1
    s = streams(ref_logprobs=reference)
    plain = run(s, kl_coef=0.0, kl_estimator="k2").loss
    found = run(s, kl_coef=0.1, kl_estimator="k2")
    assert (found.loss - plain).item() == pytest.approx(0.1 * 0.25 * (0.125 + 0.5))
    assert reduce(found.stats, 4)["policy/kl_reference"] == pytest.approx((0.125 + 0.5) / 4)
