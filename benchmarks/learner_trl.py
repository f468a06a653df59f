"""TRL's GRPOTrainer on the rows of learner_rows.py; its rollout_func returns recorded ids, so that generation costs nothing.

    python benchmarks/learner_trl.py --rows 64 --steps 3 --threads 2 [--checkpointing]

Run by learner.py in a process of its own; prints as JSON the seconds of each step after the first, of the clock and of the processor.
TRL is the extra `bench`: `pip install --constraint constraints.txt 'trl==1.16.0'` changes no other package that the learner needs.
On its best settings for these rows: no reference model, no second forward for old log-probs, no logging, activations kept
(--checkpointing, which is its default, computes them again).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from learner_rows import GROUP, LONGEST, PROMPT, SMALL, completion_lengths, make_batch, make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When each step began and ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self._start = self._used = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start, self._used = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.processor.append(time.process_time() - self._used)


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    words = {f"t{number}": number for number in range(vocab)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t2")), pad_token="t0", eos_token="t1"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"rows": 64, "steps": 3, "threads": 2, "micro": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = completion_lengths(args.rows)
    batch = make_batch(lengths, SMALL.vocab)
    rows = [batch.token_ids[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens)]

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(rows)
        return {
            "prompt_ids": [row[:PROMPT] for row in rows],
            "completion_ids": [row[PROMPT:] for row in rows],
            "logprobs": [[-8.0] * (len(row) - PROMPT) for row in rows],
        }

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(number % 2) for number in range(len(completions))]

    clock = Clock()
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(SMALL, Path(temporary) / "model")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=f"{temporary}/out",
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=args.micro,
                gradient_accumulation_steps=args.rows // args.micro,
                num_generations=GROUP,
                max_completion_length=LONGEST,
                max_steps=args.steps + 1,
                learning_rate=1e-6,
                gradient_checkpointing=args.checkpointing,
                logging_steps=1000,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["t2"] * args.rows}),
            processing_class=tokenizer(SMALL.vocab),
            rollout_func=rollout,
            callbacks=[clock],
        )
        trainer.train()
    print(json.dumps({"seconds": clock.seconds[1:], "processor": clock.processor[1:]}))


if __name__ == "__main__":
    main()
