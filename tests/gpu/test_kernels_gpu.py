"""The Triton head on a GPU against the torch reference."""

import pytest
import torch

from rlagent.kernels.logprob import linear_logprob

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(5, 64, 37), (300, 128, 1000), (513, 256, 151936)])
def test_triton_equals_torch(shape: tuple[int, int, int]) -> None:
    tokens, hidden_size, vocab = shape
    hidden = torch.randn(tokens, hidden_size, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, hidden_size, device="cuda", requires_grad=True)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    found = []
    for backend in ("torch", "triton"):
        logprob, entropy = linear_logprob(
            hidden, weight, target, temperature=0.7, return_entropy=True, chunk=128, backend=backend
        )  # type: ignore[arg-type]
        assert entropy is not None
        found.append((logprob, entropy, *torch.autograd.grad(logprob.sum() + 0.3 * entropy.sum(), (hidden, weight))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
