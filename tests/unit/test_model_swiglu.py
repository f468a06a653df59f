"""The blocked SwiGLU is the plain one, bit for bit, forward and backward."""

import pytest
import torch
from torch.nn.functional import silu

from rlagent.trainer.model.swiglu import swiglu


@pytest.mark.parametrize("shape", [(0, 1, 8), (1, 1, 2), (700, 1, 1536), (3, 5, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype).requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    grad = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    expected = silu(gate) * up
    found = swiglu(x)
    assert torch.equal(found, expected)
    ours, theirs = torch.autograd.grad(found, x, grad)[0], torch.autograd.grad(expected, x, grad)[0]
    assert torch.equal(ours, theirs)
