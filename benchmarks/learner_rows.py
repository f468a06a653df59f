"""The rows and the model that every side of benchmarks/learner.py trains on: prompts of one length, log-normal completions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlagent.types import Batch

PROMPT = 64
LONGEST = 512
GROUP = 8
"""Rows of a group have one prompt, as GRPO's do."""
MEDIAN, SIGMA = 110.0, 0.9
"""Of the log-normal completion lengths: a mean near 150, and a tail that reaches LONGEST."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Qwen3 model with tied embeddings and heads of 32 (64 from width 512)."""

    hidden: int
    layers: int
    vocab: int
    ffn: int

    @property
    def head(self) -> int:
        return 32 if self.hidden < 512 else 64


SMALL = Size(hidden=256, layers=5, vocab=4096, ffn=768)  # 5.0M parameters
HALF_BILLION = Size(hidden=896, layers=24, vocab=151_936, ffn=4864)  # the shape of Qwen2.5-0.5B


def make_model(size: Size, directory: Path) -> Qwen3ForCausalLM:
    """A random model, written where the learner and TRL read it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // size.head,
        num_key_value_heads=max(size.hidden // size.head // 4, 1) if size.hidden != 896 else 2,
        head_dim=size.head,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return model


def completion_lengths(rows: int, seed: int = 0) -> list[int]:
    """Uneven lengths, the same for every side."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, rows)
    return [int(length) for length in drawn.clip(8, LONGEST)]


def make_batch(lengths: list[int], vocab: int, *, padded: bool = False, seed: int = 0) -> Batch:
    """Rows of a prompt of PROMPT and a completion of `length` random tokens, all of it sampled; `padded`: all as long as the longest."""
    rng = np.random.default_rng(seed)
    widths = [PROMPT + (max(lengths) if padded else length) for length in lengths]
    total = sum(widths)
    tokens = rng.integers(2, vocab, total).astype(np.int32)
    mask = np.zeros(total, dtype=bool)
    advantage = np.zeros(total, np.float32)
    start = first = 0
    for number, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        if number % GROUP == 0:
            first = start
        tokens[start : start + PROMPT] = tokens[first : first + PROMPT]
        mask[start + PROMPT : start + PROMPT + length] = True
        advantage[start + PROMPT : start + PROMPT + length] = rng.normal()
        start += width
    return Batch(
        token_ids=tokens,
        position_ids=np.concatenate([np.arange(width) for width in widths]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *widths]).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -np.log(vocab), 0.0).astype(np.float32),
        temperature=np.ones(total, np.float32),
        advantages=advantage,
        weight=np.where(mask, 1.0 / mask.sum(), 0.0).astype(np.float32),
        versions=np.zeros(total, np.int32),
        rollout_index=np.arange(len(lengths), dtype=np.int32),
        num_sampled=int(mask.sum()),
    )
