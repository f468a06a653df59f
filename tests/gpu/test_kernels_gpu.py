"""The Triton head on a GPU against the torch reference."""

import pytest
import torch

from rlagent.kernels.logprob import linear_logprob

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(5, 64, 37), (300, 128, 1000), (513, 256, 151936)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_triton_equals_torch(shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    tokens, hidden_size, vocab = shape
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(0, vocab - 5, (tokens,), device="cuda")
    target[0] = -100
    found = []
    for backend in ("torch", "triton"):
        logprob, entropy = linear_logprob(
            hidden,
            weight,
            target,
            temperature=0.7,
            return_entropy=True,
            chunk=128,
            backend=backend,
            vocab_size=vocab - 5,
        )  # type: ignore[call-overload]
        assert entropy is not None
        found.append((logprob, entropy, *torch.autograd.grad(logprob.sum() + 0.3 * entropy.sum(), (hidden, weight))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_peak_memory_is_a_few_chunks_of_logits() -> None:
    tokens, hidden_size, vocab, chunk = 4096, 128, 32_000, 256
    hidden = torch.randn(tokens, hidden_size, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, hidden_size, device="cuda", requires_grad=True)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprob(hidden, weight, target, chunk=chunk)[0].sum().backward()
    gradients = 4 * (tokens * hidden_size + 2 * vocab * hidden_size)
    assert torch.cuda.max_memory_allocated() - before < gradients + 4 * 4 * chunk * vocab
