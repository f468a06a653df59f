"""Tiny random checkpoints and batches for tests of the learner, made by transformers, the oracle."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlagent.trainer.config import LearnerConfig, ParallelConfig
from rlagent.trainer.learner import Learner
from rlagent.types import Batch

VOCAB = 97  # odd, so that tensor parallelism has to pad it
LENGTHS = (7, 12, 3, 20, 1, 12)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


# Four experts, of which each token is given two; the middle one of three layers is dense.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def make_model(family: str, directory: Path, *, tied: bool = True, layers: int = 3, **changes: Any) -> Any:
    """Save a random model and return it; norms and biases are random too, so that a swapped one shows."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        **changes,
    }
    torch.manual_seed(1)
    model: Any
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape))
    elif family == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{"head_dim": 16, **EXPERTS, **shape}))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(rope_parameters=LLAMA3_ROPE, **shape))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    model.save_pretrained(directory)
    return model


def make_batch(*, lengths: Sequence[int] = LENGTHS, seed: int = 0, vocab: int = VOCAB, **changes: Any) -> Batch:
    """Random rows; half of the tokens are sampled, at one of two temperatures."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    mask = rng.random(total) < 0.5
    mask[bounds[:-1]] = False
    fields = {
        "token_ids": rng.integers(0, vocab, total).astype(np.int32),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        "cu_seqlens": bounds,
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, rng.normal(-4, 1, total), 0).astype(np.float32),
        "temperature": np.where(mask, rng.choice([1.0, 0.7], total), 1).astype(np.float32),
        "advantages": np.where(mask, rng.normal(size=total), 0).astype(np.float32),
        "weight": np.where(mask, 1.0 / max(mask.sum(), 1), 0).astype(np.float32),
        "versions": np.zeros(total, np.int32),
        "rollout_index": np.arange(len(lengths), dtype=np.int32),
        "num_sampled": int(mask.sum()),
    }
    return Batch(**{**fields, **changes})


def batch_of_rows(rows: Sequence[Sequence[int]]) -> Batch:
    """A batch of these rows, of which the second token is sampled."""
    batch = make_batch(lengths=[len(row) for row in rows])
    mask = np.isin(np.arange(batch.num_tokens), batch.cu_seqlens[:-1] + 1)
    ids = np.fromiter(itertools.chain(*rows), np.int32)
    return replace(batch, token_ids=ids, loss_mask=mask, num_sampled=int(mask.sum()))


def with_common_prefixes(batch: Batch) -> Batch:
    """The batch with most of its rows beginning as its longest does, for half of the shorter one; one of them is all prefix."""
    lengths = np.diff(batch.cu_seqlens)
    longest = int(lengths.argmax())
    ids = batch.token_ids.copy()
    experts = None if batch.experts is None else batch.experts.copy()
    for row in range(0, batch.num_rows, 2):
        length = int(lengths[row]) if row == 2 else int(lengths[row]) // 2
        to, source = (slice(start, start + length) for start in batch.cu_seqlens[[row, longest]].tolist())
        ids[to] = ids[source]
        if experts is not None:
            experts[to] = experts[source]
    return replace(batch, token_ids=ids, experts=experts)


def with_experts(batch: Batch, *, unknown: float = 0.3, seed: int = 5) -> Batch:
    """Random experts of EXPERTS for every token of three layers, but for some tokens none."""
    rng = np.random.default_rng(seed)
    count, top_k = EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
    ids = rng.permuted(np.tile(np.arange(count), (batch.num_tokens, 3, 1)), axis=-1)[..., :top_k]
    ids[rng.random(batch.num_tokens) < unknown] = -1
    return replace(batch, experts=ids.reshape(batch.num_tokens, -1).astype(np.int16))


def permuted(batch: Batch, order: Sequence[int]) -> Batch:
    """The same rows in another order."""
    bounds = batch.cu_seqlens
    index = np.concatenate([np.arange(bounds[row], bounds[row + 1]) for row in order])
    lengths = np.diff(bounds)[list(order)]
    per_token = (
        "token_ids",
        "position_ids",
        "loss_mask",
        "rollout_logprobs",
        "temperature",
        "advantages",
        "weight",
        "versions",
    )
    return Batch(
        **{name: getattr(batch, name)[index] for name in per_token},
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        rollout_index=batch.rollout_index[list(order)],
        num_sampled=batch.num_sampled,
    )


def oracle_logprobs(model: Any, batch: Batch) -> torch.Tensor:
    """transformers' logprobs [N] of the sampled tokens, row by row, with gradients; 0 elsewhere."""
    found = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:end]).long()
        logits = model(ids[None], use_cache=False).logits[0, :-1].float()
        heat = torch.from_numpy(batch.temperature[start + 1 : end])[:, None]
        row = torch.log_softmax(logits / heat, -1).gather(1, ids[1:, None])[:, 0]
        found += [torch.zeros(1), row * torch.from_numpy(batch.loss_mask[start + 1 : end])]
    return torch.cat(found)


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row nobody listens on, below those that the system gives to outgoing connections."""
    while True:
        first = random.randrange(15000, 30000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def make_learner(
    model_dir: Path, config: LearnerConfig | None = None, *, parallel: ParallelConfig | None = None, **options: Any
) -> Learner:
    """A learner of one process."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "seed": 0,
        "total_steps": 10,
        "master_port": free_ports(),
        **options,
    }
    return Learner(config or LearnerConfig(device="cpu"), parallel or ParallelConfig(), model_dir, **given)
