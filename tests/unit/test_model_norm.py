"""Our RMSNorm against torch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlagent.trainer.model.norm import RMSNorm


def make_norm(size: int, dtype: torch.dtype) -> RMSNorm:
    config = SimpleNamespace(use_cpu_initialization=True, params_dtype=dtype, sequence_parallel=True)
    norm = RMSNorm(config, size, eps=1e-5)
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    return norm


@pytest.mark.parametrize("shape", [(5, 1, 7), (3, 2, 4, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = make_norm(shape[-1], dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, dtype=dtype)
    found = norm(x)
    wide = x.detach().float().requires_grad_()
    weight = norm.weight.detach().float().requires_grad_()
    wanted = torch.nn.functional.rms_norm(wide, (shape[-1],), weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(found, (x, norm.weight), grad)
    want = torch.autograd.grad(wanted, (wide, weight), grad.float())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=4 * tolerance, atol=4 * tolerance)


def test_a_row_of_zeros_stays_finite() -> None:
    norm = make_norm(4, torch.float32)
    x = torch.zeros(2, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_the_weight_says_that_its_gradient_is_partial_under_sequence_parallelism() -> None:
    assert make_norm(4, torch.float32).weight.sequence_parallel is True  # type: ignore[attr-defined]
