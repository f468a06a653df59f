"""The policy loss with KL, entropy and its statistics: plain torch, the Triton kernel, and Liger's GRPO loss where it is installed.

    python benchmarks/policy_loss.py [--tokens 262144]

Forward and backward over packed streams. The kernel runs on a GPU only, and says so elsewhere; GB/s count each stream once.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable

import torch
from machine import machine

from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.loss import Backend, policy_loss
from rlagent.trainer.streams import LossInput

CONFIG = LossConfig(dual_clip=3.0, kl_coef=0.01, entropy_coef=0.001)
BYTES_PER_TOKEN = 4 * 7 + 1 + 4 * 2  # seven fp32 streams and the mask in; two gradients out
ROW = 1024


def make_streams(tokens: int, device: str) -> LossInput:
    """Rows of ROW tokens, seven of ten sampled."""
    logprobs = (-torch.rand(tokens, device=device)).requires_grad_()
    noise = torch.randn(3, tokens, device=device) / 10
    return LossInput(
        logprobs=logprobs, old_logprobs=logprobs.detach() + noise[0], rollout_logprobs=logprobs.detach() + noise[1],
        ref_logprobs=logprobs.detach() + noise[2], entropy=torch.rand(tokens, device=device).requires_grad_(),
        advantages=torch.randn(tokens, device=device), weight=torch.full((tokens,), 1 / tokens, device=device),
        loss_mask=torch.rand(tokens, device=device) < 0.7, sequence_index=torch.arange(tokens, device=device) // ROW,
    )  # fmt: skip


def ours(streams: LossInput, backend: Backend) -> Callable[[], object]:
    """A forward and backward pass of one of our two."""

    def step() -> None:
        policy_loss(streams, CONFIG, CorrectionConfig(), backend).loss.backward()  # type: ignore[no-untyped-call]

    return step


def liger(streams: LossInput) -> Callable[[], object]:
    """Liger's (0.8): padded rows, logits of a vocabulary of 2 (so that it is the loss that is measured), fewer statistics."""
    from liger_kernel.ops.grpo_loss import GrpoLossFunction

    rows = streams.old_logprobs.view(-1, ROW)
    logits = torch.randn(len(rows), ROW + 1, 2, device=rows.device, requires_grad=True)
    ids = torch.zeros(rows.shape, dtype=torch.int64, device=rows.device)
    mask, advantages = streams.loss_mask.view(-1, ROW).int(), streams.advantages.view(-1, ROW)[:, 0].contiguous()
    reference = streams.ref_logprobs.view(-1, ROW) if streams.ref_logprobs is not None else rows

    def step() -> None:
        found = GrpoLossFunction.apply(
            logits,
            rows,
            reference,
            ids,
            advantages,
            mask,
            1.0,
            CONFIG.kl_coef,
            CONFIG.clip_low,
            CONFIG.clip_high,
            False,
        )
        found[0].backward()

    return step


def seconds(step: Callable[[], object], repeats: int = 10) -> float:
    """The best of some rounds after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2**18)
    args = parser.parse_args()
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    streams = make_streams(args.tokens // ROW * ROW, "cuda" if cuda else "cpu")
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads: {len(streams.weight)} tokens")
    runs = {"plain torch": ours(streams, "torch")}
    if cuda:
        runs["triton"] = ours(streams, "triton")
        if importlib.util.find_spec("liger_kernel") is not None:
            runs["liger"] = liger(streams)
    for name, step in runs.items():
        took = seconds(step)
        print(f"{name:12} {took * 1e3:9.3f} ms {len(streams.weight) * BYTES_PER_TOKEN / took / 1e9:8.2f} GB/s")
    if not cuda:
        print("no GPU here: the Triton kernel and Liger were not measured")


if __name__ == "__main__":
    main()
