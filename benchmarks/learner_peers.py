"""The loops that one would write with plain transformers: logprobs of a batch's sampled tokens, a clipped loss, AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from rlagent.trainer.plan import plan
from rlagent.types import Batch

Pieces = Iterable[tuple[Tensor, Tensor]]  # logprobs of sampled tokens, and where they stand in the batch


def _loss(logprobs: Tensor, advantages: Tensor, weight: Tensor) -> Tensor:
    ratio = (logprobs - logprobs.detach()).exp()
    clipped = ratio.clamp(0.8, 1.28)
    return (weight * torch.maximum(-advantages * ratio, -advantages * clipped)).sum()


def _step(model: Qwen3ForCausalLM, batch: Batch, forward: Callable[[], Pieces]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    device = next(model.parameters()).device
    advantages = torch.from_numpy(batch.advantages).to(device)
    weight = torch.from_numpy(batch.weight).to(device)

    def step() -> None:
        optimizer.zero_grad()
        for logprobs, places in forward():
            _loss(logprobs, advantages[places], weight[places]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _ids(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    return torch.from_numpy(batch.token_ids).long().to(next(model.parameters()).device)


def row_by_row(model: Qwen3ForCausalLM, batch: Batch) -> Callable[[], None]:
    """One row a forward and backward; the head on its completion only."""
    ids = _ids(model, batch)
    bounds = batch.cu_seqlens.tolist()

    def forward() -> Iterator[tuple[Tensor, Tensor]]:
        for start, end in itertools.pairwise(bounds):
            places = torch.from_numpy(batch.loss_mask[start:end]).nonzero()[:, 0].to(ids.device) + start
            kept = end - int(places[0])
            logits = model(ids[None, start:end], use_cache=False, logits_to_keep=kept + 1).logits[0, :-1]
            yield torch.log_softmax(logits.float(), -1).gather(-1, ids[places, None])[:, 0], places

    return _step(model, batch, forward)


def padded(model: Qwen3ForCausalLM, batch: Batch, budget: int) -> Callable[[], None]:
    """Rows of like length padded in microbatches of `budget` tokens, with an attention mask; the head on all tokens."""
    ids = _ids(model, batch)
    bounds = batch.cu_seqlens.tolist()
    lengths = {row: bounds[row + 1] - bounds[row] for row in range(batch.num_rows)}
    groups: list[list[int]] = [[]]
    for row in sorted(lengths, key=lengths.__getitem__):
        if groups[-1] and (len(groups[-1]) + 1) * lengths[row] > budget:
            groups.append([])
        groups[-1].append(row)
    mask = torch.from_numpy(batch.loss_mask).to(ids.device)

    def forward() -> Iterator[tuple[Tensor, Tensor]]:
        for group in groups:
            at = [torch.arange(bounds[row], bounds[row + 1], device=ids.device) for row in group]
            places = torch.nn.utils.rnn.pad_sequence(at, batch_first=True, padding_value=-1)
            real = places >= 0
            logits = model(ids[places] * real, attention_mask=real.long(), use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[places][:, 1:, None])[..., 0]
            wanted = real[:, 1:] & mask[places[:, 1:]]
            yield logprobs[wanted], places[:, 1:][wanted]

    return _step(model, batch, forward)


def packed(model: Qwen3ForCausalLM, batch: Batch, budget: int) -> Callable[[], None]:
    """The learner's own microbatches, back to back in one row, told apart by position ids; the head on all tokens."""
    ids = _ids(model, batch)
    positions = torch.from_numpy(batch.position_ids).long().to(ids.device)
    mask = torch.from_numpy(batch.loss_mask).to(ids.device)
    bounds = batch.cu_seqlens.tolist()
    lengths = [bounds[row + 1] - bounds[row] for row in range(batch.num_rows)]
    streams = [
        torch.cat([torch.arange(bounds[row], bounds[row + 1], device=ids.device) for row in rows])
        for rows in plan(lengths, budget=budget, ranks=1)[0]
    ]

    def forward() -> Iterator[tuple[Tensor, Tensor]]:
        for stream in streams:
            found = model(ids[stream][None], position_ids=positions[stream][None], use_cache=False)
            wanted = mask[stream][1:]
            logits = found.logits[0, :-1][wanted]
            places = stream[1:][wanted]
            yield torch.log_softmax(logits.float(), -1).gather(-1, ids[places, None])[:, 0], places

    return _step(model, batch, forward)
