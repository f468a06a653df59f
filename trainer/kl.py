"""Estimators of KL(policy || reference) from one sample a token (Schulman, "Approximating KL divergence", 2020)."""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor


def k1(difference: Tensor) -> Tensor:
    """-d with d = lp_ref - lp: unbiased, high variance, may be negative."""
    return -difference


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: biased value, but its gradient is the KL's in expectation."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """exp(d) - d - 1: unbiased, never negative; its gradient in the loss is biased."""
    return difference.exp() - difference - 1


def k3_unbiased(difference: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    gradient = k2(difference)
    return k3(difference).detach() + (gradient - gradient.detach())


KL_ESTIMATORS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_unbiased": k3_unbiased,
}
