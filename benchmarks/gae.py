"""gae_packed against a loop over tokens: seconds and GB/s over the streams it must touch.

    python benchmarks/gae.py [--rows 64 --tokens 1024]

The loop is the definition, in Python. On a GPU the Triton kernel is measured too, beside a plain copy of as many bytes.
"""

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from machine import machine
from torch import Tensor

from rlagent.kernels.gae import gae_packed, reference

GAMMA, LAM = 0.99, 0.95
BYTES_PER_TOKEN = 4 + 4 + 1 + 4 + 4  # reward, value, mask in; advantage, return out


def loop(reward: Tensor, value: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float) -> None:
    """One token at a time."""
    r, v, m, bounds = reward.tolist(), value.tolist(), mask.tolist(), cu_seqlens.tolist()
    found = [0.0] * len(r)
    for start, end in itertools.pairwise(bounds):
        ahead = v_next = 0.0
        for t in range(end - 1, start - 1, -1):
            if m[t]:
                ahead = r[t] + gamma * v_next - v[t] + gamma * lam * ahead
                found[t], v_next = ahead, v[t]
    torch.tensor(found)


def seconds(function: Callable[[], object], cuda: bool, repeats: int = 5) -> float:
    """The best of some rounds after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    torch.manual_seed(0)
    n = args.rows * args.tokens
    reward, value, mask = torch.randn(n), torch.randn(n), torch.rand(n) < 0.7
    bounds = torch.arange(0, n + 1, args.tokens, dtype=torch.int32)
    size = n * BYTES_PER_TOKEN / 1e9
    print(f"{machine()}, torch {torch.__version__}: {args.rows} rows of {args.tokens} tokens")
    runs = {"loop": (loop, "cpu"), "reference": (reference, "cpu")}
    if torch.cuda.is_available():
        runs["triton"] = (gae_packed, "cuda")
    for name, (function, device) in runs.items():
        streams = [x.to(device) for x in (reward, value, mask, bounds)]
        took = seconds(lambda: function(*streams, GAMMA, LAM), device == "cuda")  # noqa: B023
        print(f"{name:10} {took * 1e3:9.3f} ms {size / took:8.2f} GB/s")


if __name__ == "__main__":
    main()
