"""Tokens per second of a learner step on the CPU: rows packed, rows padded, and a plain transformers loop on them.

    python benchmarks/learner.py [--layers 3 --hidden 128 --rows 64 --steps 5]

"Tokens" are the rows' own, never padding. All three run forward, backward and AdamW in fp32 on one thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlagent.trainer.config import BatchConfig, LearnerConfig, ParallelConfig
from rlagent.trainer.learner import Learner
from rlagent.types import Batch

SAMPLED_FRACTION = 0.3
"""Of a multi-turn row's tokens; the rest are prompts and tool answers."""


def make_model(args: argparse.Namespace, directory: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(args.hidden // 64, 1),
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return model


def make_batch(rng: np.random.Generator, lengths: list[int], vocab: int, width: int | None = None) -> Batch:
    """Random rows; with `width` every row is padded to it, its padding neither sampled nor counted."""
    widths = [width or length for length in lengths]
    total = sum(widths)
    mask = np.zeros(total, dtype=bool)
    start = 0
    for length, row_width in zip(lengths, widths, strict=True):
        mask[start + 1 : start + length] = rng.random(length - 1) < SAMPLED_FRACTION
        start += row_width
    return Batch(
        token_ids=rng.integers(0, vocab, total).astype(np.int32),
        position_ids=np.concatenate([np.arange(row_width) for row_width in widths]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *widths]).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
        temperature=np.ones(total, np.float32),
        advantages=np.where(mask, rng.normal(size=total), 0.0).astype(np.float32),
        weight=np.where(mask, 1.0 / mask.sum(), 0.0).astype(np.float32),
        versions=np.zeros(total, np.int32),
        rollout_index=np.arange(len(lengths), dtype=np.int32),
        num_sampled=int(mask.sum()),
    )


def transformers_step(model: Qwen3ForCausalLM, batch: Batch, tokens: int) -> Callable[[], None]:
    """The loop one would write: rows of like length padded in microbatches of `tokens`, -advantage * logprob, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    bounds = batch.cu_seqlens.tolist()
    rows = sorted(range(batch.num_rows), key=lambda row: bounds[row + 1] - bounds[row])
    groups: list[list[int]] = [[]]
    for row in rows:
        if groups[-1] and (len(groups[-1]) + 1) * (bounds[row + 1] - bounds[row]) > tokens:
            groups.append([])
        groups[-1].append(row)

    def padded(values: np.ndarray, group: list[int]) -> torch.Tensor:
        pieces = [torch.from_numpy(values[bounds[row] : bounds[row + 1]]) for row in group]
        return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)

    def step() -> None:
        optimizer.zero_grad()
        for group in groups:
            ids = padded(batch.token_ids, group).long()
            lengths = torch.tensor([bounds[row + 1] - bounds[row] for row in group])
            attention = torch.arange(ids.shape[1]) < lengths[:, None]
            logits = model(ids, attention_mask=attention.long(), use_cache=False).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            streams = padded(batch.advantages * batch.weight, group)[:, 1:]
            (-(logprobs * streams).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def seconds(step: Callable[[], object], steps: int) -> float:
    """The median time of a step, after one to warm up."""
    step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 3, "hidden": 128, "vocab": 640, "rows": 64, "steps": 5, "tokens": 16384}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    lengths = rng.integers(60, 340, args.rows).tolist()
    batch = make_batch(rng, lengths, args.vocab)
    padded = make_batch(rng, lengths, args.vocab, width=max(lengths))
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(args, Path(temporary))
        learner = Learner(
            LearnerConfig(device="cpu", batch=BatchConfig(tokens=args.tokens)),
            ParallelConfig(),
            Path(temporary),
            rank=0,
            world_size=1,
            master_port=29555,
            seed=0,
            total_steps=1000,
        )
        times = {
            "learner, packed": seconds(lambda: learner.train_step(batch), args.steps),
            "learner, padded": seconds(lambda: learner.train_step(padded), args.steps),
            "transformers, padded by like length": seconds(transformers_step(model, batch, args.tokens), args.steps),
        }
        learner.close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}"
    )
    print(f"{parameters / 1e6:.2f}M parameters, {len(lengths)} rows of {min(lengths)} to {max(lengths)}")
    for name, step_s in times.items():
        print(f"{name:40s} {step_s:8.3f} s a step {sum(lengths) / step_s:10.0f} tokens/s")


if __name__ == "__main__":
    main()
