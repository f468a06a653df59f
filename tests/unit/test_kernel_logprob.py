"""linear_logprob against plain torch: values, gradients, chunks, padding, ignored rows, and two vocabulary shards."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlagent.kernels.logprob import linear_logprob

T, H, V = 37, 16, 53


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=dtype).requires_grad_()
    target = torch.randint(0, V, (T,), generator=generator)
    temperature = 0.5 + torch.rand(T, generator=generator)
    return hidden, weight, target, temperature


def oracle(hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    scale = torch.as_tensor(temperature).expand(len(target)).unsqueeze(1)
    logp = torch.log_softmax(hidden @ weight.T / scale, -1)
    return logp.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 10, 37, 2048])
@pytest.mark.parametrize("tempered", [False, True])
def test_values_and_gradients(chunk: int, tempered: bool) -> None:
    hidden, weight, target, temperature = inputs(torch.float32)
    scale: Tensor | float = temperature if tempered else 1.0
    found = linear_logprob(hidden, weight, target, temperature=scale, return_entropy=True, chunk=chunk)
    expected = oracle(hidden, weight, target, scale)
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    g, h = torch.linspace(-1, 1, T), torch.linspace(2, -1, T)
    assert found[1] is not None
    ours = torch.autograd.grad(found[0] @ g + found[1] @ h, (hidden, weight))
    theirs = torch.autograd.grad(expected[0] @ g + expected[1] @ h, (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_gradient_is_a_finite_difference() -> None:
    hidden, weight, target, temperature = inputs(torch.float32)

    def value(h: Tensor) -> Tensor:
        logprob, entropy = linear_logprob(h, weight, target, temperature=temperature, return_entropy=True, chunk=8)
        assert entropy is not None
        return logprob.sum() + 0.3 * entropy.sum()

    (gradient,) = torch.autograd.grad(value(hidden), hidden)
    step = torch.zeros_like(hidden)
    step[5, 3] = 1e-2
    difference = (value(hidden + step) - value(hidden - step)) / 2e-2
    assert gradient[5, 3].item() == pytest.approx(difference.item(), rel=2e-2)


def test_an_ignored_row_is_zero_and_touches_no_gradient_whatever_it_holds() -> None:
    hidden, weight, target, temperature = inputs(torch.float32)
    target[4] = -100
    dirty = hidden.detach().clone()
    dirty[4] = torch.nan
    dirty.requires_grad_()
    logprob, entropy = linear_logprob(dirty, weight, target, temperature=temperature, return_entropy=True)
    assert entropy is not None
    assert logprob[4] == entropy[4] == 0
    gradients = torch.autograd.grad(logprob.sum() + entropy.sum(), (dirty, weight))
    assert (gradients[0][4] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_padding_of_the_vocabulary_is_no_part_of_the_distribution() -> None:
    hidden, weight, target, _ = inputs(torch.float32)
    target = target % 50
    found, _ = linear_logprob(hidden, weight, target, vocab_size=50)
    torch.testing.assert_close(found, oracle(hidden, weight[:50], target, 1.0)[0], rtol=1e-5, atol=2e-5)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    assert (gradient[50:] == 0).all()


def test_no_entropy_unless_asked_for() -> None:
    hidden, weight, target, _ = inputs(torch.float32)
    assert linear_logprob(hidden, weight, target)[1] is None


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation put out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_no_logits_of_the_whole_batch_exist() -> None:
    hidden = torch.randn(400, 8, requires_grad=True)
    weight = torch.randn(500, 8, requires_grad=True)
    with LargestTensor() as largest:
        logprob, _ = linear_logprob(hidden, weight, torch.randint(0, 500, (400,)), chunk=16)
        logprob.sum().backward()
    assert largest.numel <= 16 * 500


SHARDS = """
import sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
from test_kernel_logprob import inputs, oracle
from rlagent.kernels.logprob import linear_logprob
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
hidden, weight, target, temperature = inputs(torch.float32)
padded = torch.cat((weight.detach(), torch.full((28, 16), 7.0)))  # 81 = 3 x 27: the last shard is padding
shard = padded[27 * rank : 27 * rank + 27].clone().requires_grad_()
options = dict(return_entropy=True, tp_group=dist.group.WORLD, chunk=10, vocab_size=53)
found, entropy = linear_logprob(hidden, shard, target, temperature=temperature, **options)
expected, h = oracle(hidden, weight, target, temperature)
torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
torch.testing.assert_close(entropy, h, rtol=1e-4, atol=5e-5)
ours = torch.autograd.grad(found.sum() + 0.5 * entropy.sum(), (hidden, shard))
theirs = torch.autograd.grad(expected.sum() + 0.5 * h.sum(), (hidden, weight))
torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
full = torch.cat((theirs[1], torch.zeros(28, 16)))
torch.testing.assert_close(ours[1], full[27 * rank : 27 * rank + 27], rtol=1e-4, atol=1e-4)
dist.destroy_process_group()
"""


def test_three_vocabulary_shards_are_one_head(tmp_path: Path) -> None:
    from rlagent.launch.local import free_port

    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDS, str(rank), port, str(Path(__file__).parent)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
