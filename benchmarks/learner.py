"""Sampled tokens per second of a learner step, beside plain transformers loops and TRL's GRPOTrainer on the same uneven rows.

    python benchmarks/learner.py [--rows 64 --rounds 3 --threads 1] [--trl PYTHON]

All sides run forward, backward, clipping and AdamW: on the CPU a model of 5.0M parameters in fp32, on a GPU (where there is one) one
of 0.5B in bf16, with MFU and peak memory. Sides take turns, so that other work on the machine meets all alike; of each side the
fastest round counts, in seconds and in seconds of the processor. --trl names a python that has TRL (see learner_trl.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from learner_peers import packed, padded, row_by_row
from learner_rows import GROUP, HALF_BILLION, PROMPT, SMALL, completion_lengths, make_batch, make_model
from machine import machine

from rlagent.launch.local import free_port
from rlagent.trainer.config import BatchConfig, LearnerConfig, ParallelConfig
from rlagent.trainer.learner import Learner

H200_FLOPS = 989e12  # dense bf16


@dataclass
class Side:
    """One contender, and what its rounds took."""

    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def round(self) -> None:
        """One step, timed."""
        start, used = time.perf_counter(), time.process_time()
        self.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - used)


def trl(python: str, args: argparse.Namespace, *extra: str) -> tuple[float, float]:
    """Seconds, and seconds of the processor, of TRL's fastest step."""
    script = Path(__file__).with_name("learner_trl.py")
    command = [
        python,
        str(script),
        f"--rows={args.rows}",
        f"--steps={args.rounds}",
        f"--threads={args.threads}",
        *extra,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return min(found["seconds"]), min(found["processor"])


def make_learner(directory: Path, args: argparse.Namespace, cuda: bool) -> Learner:
    return Learner(
        LearnerConfig(
            device="cuda" if cuda else "cpu",
            dtype="bfloat16" if cuda else "float32",
            threads=args.threads,
            batch=BatchConfig(tokens=args.tokens),
        ),
        ParallelConfig(),
        directory,
        rank=0,
        world_size=1,
        master_port=free_port(),
        seed=0,
        total_steps=1000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"rows": 64, "rounds": 3, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tokens", type=int, default=BatchConfig().tokens, help="the learner's microbatches")
    parser.add_argument("--loop-tokens", type=int, default=4096, help="those of the loops with transformers")
    parser.add_argument("--trl", metavar="PYTHON", help="a python that has TRL")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cuda = torch.cuda.is_available()
    size = HALF_BILLION if cuda else SMALL
    lengths = completion_lengths(args.rows)
    batch = make_batch(lengths, size.vocab)
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(size, Path(temporary))
        if cuda:
            model = model.to("cuda", torch.bfloat16)
        learner = make_learner(Path(temporary), args, cuda)
        sides = {
            "learner, packed": Side(lambda: learner.train_step(batch)),
            "transformers, the same packed rows": Side(packed(model, batch, args.loop_tokens)),
            "transformers, padded by like length": Side(padded(model, batch, args.loop_tokens)),
            "transformers, row by row": Side(row_by_row(model, batch)),
        }
        for _ in range(args.rounds + 1):  # the first one warms up
            for side in sides.values():
                side.round()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            learner.train_step(batch)
            peak = torch.cuda.max_memory_allocated() / 2**30
        learner.close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{machine()}, torch {torch.__version__}, {args.threads} threads")
    print(f"{parameters / 1e6:.1f}M parameters; {args.rows} rows in groups of {GROUP}: prompts of {PROMPT}, completions of {min(lengths)} "
          f"to {max(lengths)}, {sum(lengths)} sampled tokens")  # fmt: skip
    times = {name: (min(side.seconds[1:]), min(side.processor[1:])) for name, side in sides.items()}
    if args.trl:
        times["TRL GRPOTrainer"] = trl(args.trl, args)
        times["TRL GRPOTrainer, its defaults"] = trl(args.trl, args, "--checkpointing")
    first = times["learner, packed"]
    for name, (seconds, used) in times.items():
        print(
            f"{name:36s} {seconds:8.2f} s {sum(lengths) / seconds:7.0f} tokens/s {seconds / first[0]:6.2f}x   "
            f"{used:8.2f} s of processor {used / first[1]:6.2f}x"
        )
    if cuda:
        flops = 6 * parameters * batch.num_tokens
        print(
            f"learner: MFU {flops / first[0] / H200_FLOPS:.3f} of an H200's {H200_FLOPS:.3g} FLOP/s, peak {peak:.1f} GiB"
        )
    else:
        print("no GPU here: nothing was measured on one")


if __name__ == "__main__":
    main()
