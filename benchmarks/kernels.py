"""linear_logprob against plain full-logits torch: forward + backward of logprob and entropy, time and peak memory.

    python benchmarks/kernels.py [--tokens 4096 --threads 1 --repeats 2]

Each case runs in a process of its own, so that its peak is its own. On a GPU: the size of a large head in bfloat16, beside the
four bare matrix products of forward and backward, which bound the time from below, and Liger's loss where it is installed.
"""

import argparse
import importlib.util
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from machine import machine
from torch import Tensor

from rlagent.kernels.logprob import linear_logprob

CPU_SIZES = ((128, 600), (512, 600), (128, 32_000), (512, 32_000))  # hidden, vocabulary
GPU_SIZES = ((4096, 151_936),)
GPU_TOKENS = 8192
TEMPERATURE = 0.9
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    method: str
    tokens: int
    hidden: int
    vocab: int
    device: str
    threads: int
    repeats: int


def chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    """Ours."""
    logprob, entropy = linear_logprob(hidden, weight, target, temperature=TEMPERATURE, return_entropy=True)
    assert entropy is not None
    (logprob.sum() + 0.1 * entropy.sum()).backward()  # type: ignore[no-untyped-call]


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    """What one would write: all logits, log_softmax, gather."""
    logp = torch.log_softmax((hidden @ weight.T).float() / TEMPERATURE, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    (logp.gather(1, target.unsqueeze(1)).sum() + 0.1 * entropy.sum()).backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def products(hidden: Tensor, weight: Tensor, _: Tensor) -> None:
    """The matrix products alone, in the same chunks: logits, logits again, and the two gradients."""
    for part in hidden.split(2048):
        z = part @ weight.T
        z = part @ weight.T
        z @ weight
        z.T @ part


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    """Liger's fused cross entropy (0.8): the sum of the logprobs alone, without entropy or temperature."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, target).backward()


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "plain": plain,
    "linear_logprob": chunked,
    "products": products,
    "liger": liger,
}


def peak_mib(device: str) -> float:
    """The most memory ever held: by tensors on a GPU, by the process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(case: Case) -> tuple[float, float]:
    """(seconds: the best of some rounds after one to warm up; MiB of the peak above the inputs)."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    cuda = case.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    hidden = torch.randn(case.tokens, case.hidden, device=case.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(case.vocab, case.hidden, device=case.device, dtype=dtype) / case.hidden**0.5
    weight.requires_grad_()
    target = torch.randint(0, case.vocab, (case.tokens,), device=case.device)
    METHODS[case.method](hidden.detach()[:8].requires_grad_(), weight.detach()[:8].requires_grad_(), target[:8] % 8)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = peak_mib(case.device)
    times = []
    for _ in range(case.repeats + 1):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        METHODS[case.method](hidden, weight, target)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:]), peak_mib(case.device) - before


def main() -> None:
    """Run every size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"tokens": 4096, "threads": 1, "repeats": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}, {args.threads} threads")
    runs = [("cpu", args.tokens, size, ("plain", "linear_logprob")) for size in CPU_SIZES]
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        peers = ("liger",) if importlib.util.find_spec("liger_kernel") is not None else ()
        runs += [("cuda", GPU_TOKENS, size, ("products", "plain", "linear_logprob", *peers)) for size in GPU_SIZES]
    else:
        print("no GPU here: the Triton kernels, the bare products and Liger were not measured")
    print(
        f"{'device':6} {'tokens':>6} {'hidden':>6} {'vocab':>7} {'method':15} {'seconds':>8} {'ratio':>6} {'peak MiB':>9}"
    )
    for device, tokens, (hidden, vocab), methods in runs:
        first = None
        for method in methods:
            case = Case(
                method=method, tokens=tokens, hidden=hidden, vocab=vocab, device=device, threads=args.threads,
                repeats=args.repeats,
            )  # fmt: skip
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                seconds, peak = pool.submit(measure, case).result()
            first = first or seconds
            row = f"{device:6} {tokens:6} {hidden:6} {vocab:7} {method:15} {seconds:8.4f} {seconds / first:6.2f} {peak:9.0f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
