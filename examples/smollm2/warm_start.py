"""A short supervised start: SmolLM2 learns the form of a tool call from a careless agent that often stops looking and guesses.

What is left for reinforcement learning is to look everything up. `python warm_start.py MODEL_DIRECTORY OUT_DIRECTORY`: about a quarter
of an hour on two cores, seconds on a GPU.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlagent.envs.parcels import TOOLS, generate_tasks
from rlagent.loading import load_function

PARCELS: Final = Path(__file__).resolve().parent.parent / "parcels"
STOPS: Final = (
    0.1,
    0.1,
    0.5,
)  # chances of guessing before the first, second and third call: success is the product of what is left
BATCH: Final = 8  # conversations a step
PEAK_LR: Final = 2e-4
WARMUP_STEPS: Final = 4
OPENING: Final = "<|im_start|>assistant\n"
CLOSING: Final = "<|im_end|>"
IGNORED: Final = -100


def rows(tokenizer: Any, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and labels of conversations without end; labels on what the assistant wrote, tokenised apart as when it is sampled."""
    write = load_function(f"{PARCELS / 'make_model.py'}:write_conversation", what="conversation writer")
    rng = random.Random(seed)
    for task in generate_tasks("train", seed=seed):
        text = tokenizer.apply_chat_template(write(task, STOPS, rng), tools=list(TOOLS), tokenize=False)
        lead, *turns = text.split(OPENING)
        ids, labels = tokenizer.encode(lead + OPENING, add_special_tokens=False), []
        labels = [IGNORED] * len(ids)
        for number, turn in enumerate(turns, start=1):
            answer, closing, rest = turn.partition(CLOSING)
            said = tokenizer.encode(answer + closing, add_special_tokens=False)
            more = tokenizer.encode(rest + (OPENING if number < len(turns) else ""), add_special_tokens=False)
            ids += said + more
            labels += said + [IGNORED] * len(more)
        yield ids, labels


def batches(tokenizer: Any, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Padded [BATCH, T] ids and labels."""
    found = rows(tokenizer, seed)
    while True:
        group = [next(found) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in group)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in group])
        yield ids, torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in group])


def main(model_dir: Path, out: Path, *, steps: int, seed: int) -> None:
    """Train, and write a directory like the model's own."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0) * (1 - step / steps)
    )
    for step, (ids, labels) in zip(range(1, steps + 1), batches(tokenizer, seed), strict=False):
        loss = model(input_ids=ids.to(device), labels=labels.to(device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"warm start {step}/{steps}: loss {loss.item():.3f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_dir / name, out / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.model, given.out, steps=given.steps, seed=given.seed)
