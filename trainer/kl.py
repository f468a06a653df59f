"""Estimators of KL(policy || reference) from one sample a token (Schulman, "Approximating KL divergence", 2020)."""

from collections.abc import Callable, Mapping
from typing import Final

from jaxtyping import Float
from torch import Tensor

# Element by element.
Numbers = Float[Tensor, "*n"]


def k1(difference: Numbers) -> Numbers:
    """-d with d = lp_ref - lp: unbiased, high variance, may be negative."""
    return -difference


def k2(difference: Numbers) -> Numbers:
    """d^2 / 2: biased value, but its gradient is the KL's in expectation."""
    return difference.square() / 2


def k3(difference: Numbers) -> Numbers:
    """exp(d) - d - 1: unbiased, never negative; its gradient in the loss is biased."""
    return difference.exp() - difference - 1


def k3_unbiased(difference: Numbers) -> Numbers:
    """The value of k3 with the gradient of k2."""
    gradient = k2(difference)
    return k3(difference).detach() + (gradient - gradient.detach())


KL_ESTIMATORS: Final[Mapping[str, Callable[[Numbers], Numbers]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_unbiased": k3_unbiased,
}
