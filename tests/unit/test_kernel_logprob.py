"""linear_logprob against plain torch: values, gradients, chunks, padding, ignored rows, and two vocabulary shards."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlagent.kernels.logprob import linear_logprob

T, H, V = 37, 16, 53


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    hidden, weight, target, temperature = inputs()
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


@pytest.mark.parametrize("which", [0, 1])
def test_each_output_alone(which: int) -> None:
    # The other one's gradient is then None, not zeros.
    hidden, weight, target, temperature = inputs()
    found = linear_logprob(hidden, weight, target, temperature=temperature, return_entropy=True, chunk=10)[which]
    assert found is not None
    g = torch.linspace(-1, 1, T)
    ours = torch.autograd.grad(found @ g, (hidden, weight))
    theirs = torch.autograd.grad(oracle(hidden, weight, target, temperature)[which] @ g, (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_invariant_11_the_gradient_is_a_finite_difference() -> None:
    hidden, weight, target, temperature = inputs()

    def value(h: Tensor, w: Tensor) -> Tensor:
        logprob, entropy = linear_logprob(h, w, target, temperature=temperature, return_entropy=True, chunk=8)
        assert entropy is not None
        return logprob.double().sum() + 0.3 * entropy.double().sum()

    gradients = torch.autograd.grad(value(hidden, weight), (hidden, weight))
    generator = torch.Generator().manual_seed(1)
    for direction in range(3):  # along random directions: one difference checks every entry of both
        along = [torch.randn(x.shape, generator=generator) for x in (hidden, weight)]
        steps = [1e-3 * d for d in along]
        difference = value(hidden + steps[0], weight + steps[1]) - value(hidden - steps[0], weight - steps[1])
        slope = sum((gradient * d).sum().item() for gradient, d in zip(gradients, along, strict=True))
        assert difference.item() / 2e-3 == pytest.approx(slope, rel=1e-2, abs=1e-2), direction


def test_bfloat16_stays_within_its_rounding() -> None:
    hidden, weight, target, temperature = inputs()
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    full = [x.detach().float().requires_grad_() for x in half]
    found = linear_logprob(half[0], half[1], target, temperature=temperature, return_entropy=True, chunk=10)
    expected = oracle(full[0], full[1], target, temperature)
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=0.15)
    ours, theirs = (torch.autograd.grad(x[0].sum(), y) for x, y in ((found, half), (expected, full)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() <= 0.02 * b.norm()


def test_invariant_25_temperature_and_padding_are_part_of_the_distribution() -> None:
    # Three tokens by hand: logits 2, 0 and padding, at temperature 2.
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [0.0], [50.0]])
    found, entropy = linear_logprob(
        hidden, weight, torch.tensor([0]), temperature=2.0, return_entropy=True, vocab_size=2
    )
    p = math.e / (math.e + 1)
    assert found.item() == pytest.approx(math.log(p))
    assert entropy is not None
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.full((2, 1), 1e4), torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    logprob, entropy = linear_logprob(hidden, weight, torch.tensor([0, 1]), return_entropy=True)
    assert entropy is not None
    assert logprob.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(logprob.sum() + entropy.sum(), weight)[0].isfinite().all()


def test_no_tokens() -> None:
    weight = torch.randn(V, H, requires_grad=True)
    logprob, _ = linear_logprob(torch.empty(0, H), weight, torch.empty(0, dtype=torch.int64))
    assert logprob.shape == (0,)
    (gradient,) = torch.autograd.grad(logprob.sum(), weight)
    assert not gradient.any()


def test_an_ignored_row_is_zero_and_touches_no_gradient_whatever_it_holds() -> None:
    hidden, weight, target, temperature = inputs()
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
    hidden, weight, target, _ = inputs()
    target = target % 50
    found, _ = linear_logprob(hidden, weight, target, vocab_size=50)
    torch.testing.assert_close(found, oracle(hidden, weight[:50], target, 1.0)[0], rtol=1e-5, atol=2e-5)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    assert (gradient[50:] == 0).all()


def test_no_entropy_unless_asked_for() -> None:
    hidden, weight, target, _ = inputs()
    assert linear_logprob(hidden, weight, target)[1] is None


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation put out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("return_entropy", [False, True])
def test_no_logits_of_the_whole_batch_exist(return_entropy: bool) -> None:
    hidden = torch.randn(400, 8, requires_grad=True)
    weight = torch.randn(500, 8, requires_grad=True)
    with LargestTensor() as largest:
        target = torch.randint(0, 500, (400,))
        found = linear_logprob(hidden, weight, target, chunk=16, return_entropy=return_entropy)
        sum(x.sum() for x in found if x is not None).backward()  # type: ignore[union-attr]
    assert largest.numel <= 16 * 500


def test_one_chunk_of_the_logits_waits_for_the_backward_pass_and_is_used_once() -> None:
    hidden, weight, target, temperature = inputs()
    logprob, entropy = linear_logprob(hidden, weight, target, temperature=temperature, return_entropy=True, chunk=10)
    assert entropy is not None
    node: Any = logprob.grad_fn
    assert node.last_logits.shape == (T % 10, V)
    loss = logprob.sum() + entropy.sum()
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    assert node.last_logits is None
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert all(tensor.numel() <= max(T * H, V * H) for tensor in node.saved_tensors)


def test_no_logits_wait_where_no_gradient_is_asked_for() -> None:
    hidden, weight, target, _ = inputs()
    with torch.no_grad():
        assert linear_logprob(hidden, weight, target)[0].grad_fn is None


SHARDS = """
import sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
from test_kernel_logprob import inputs, oracle
from rlagent.kernels.logprob import linear_logprob
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
def check():  # a function, so that nothing holds the group when it is destroyed: gloo's threads would abort the exit
    hidden, weight, target, temperature = inputs()
    target[3] = -100
    padded = torch.cat((weight.detach(), torch.full((28, 16), 7.0)))  # 81 = 3 x 27: the last shard is padding
    shard = padded[27 * rank : 27 * rank + 27].clone().requires_grad_()
    options = dict(return_entropy=True, tp_group=dist.group.WORLD, chunk=10, vocab_size=53)
    dirty = torch.where((target == -100).unsqueeze(1), torch.nan, hidden)
    found, entropy = linear_logprob(dirty, shard, target, temperature=temperature, **options)
    expected, h = (torch.where(target == -100, 0.0, x) for x in oracle(hidden, weight, target, temperature))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy, h, rtol=1e-4, atol=5e-5)
    ours = torch.autograd.grad(found.sum() + 0.5 * entropy.sum(), (hidden, shard))
    theirs = torch.autograd.grad(expected.sum() + 0.5 * h.sum(), (hidden, weight))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    full = torch.cat((theirs[1], torch.zeros(28, 16)))
    torch.testing.assert_close(ours[1], full[27 * rank : 27 * rank + 27], rtol=1e-4, atol=1e-4)
check()
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
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], errors
