"""Routing replay: the learner takes the engine's experts, learns through their gates, and agrees with the engine."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from engine_inside import generate, output_logprobs, prompts, routed_experts, running
from learner_gradients import assert_same, config, gradients, oracle_gradients
from router_harness import MODEL, TOKENIZER
from safetensors.torch import load_file, save_file
from tiny_models import EXPERTS, make_batch, make_learner, make_model, oracle_logprobs, with_experts
from torch import Tensor

from rlagent.buffer.config import BufferConfig
from rlagent.client import RouterClient
from rlagent.engine.config import EngineConfig
from rlagent.errors import LearnerError
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving
from rlagent.trainer.batch import pack
from rlagent.trainer.learner import Learner
from rlagent.types import Batch, Int16Array

LAYERS, TOP_K = 3, EXPERTS["num_experts_per_tok"]
MIXTURES = (0, 2)  # the layer between is dense


@contextmanager
def forced(model: Any, batch: Batch) -> Iterator[None]:
    """transformers' routers, made to take a batch's experts where it names some; rows must be run in the batch's order."""
    ids = torch.from_numpy(batch.experts.reshape(-1, LAYERS, TOP_K)).long() if batch.experts is not None else None
    assert ids is not None
    handles = []

    def hook(layer: int) -> Any:
        start = 0

        def forward(router: Any, inputs: tuple[Tensor], output: Any) -> Any:
            nonlocal start
            logits, _, own = output
            given = ids[start : start + len(logits), layer]
            start += len(logits)
            chosen = torch.where(given[:, :1] < 0, own, given)
            chances = torch.softmax(logits, -1).gather(1, chosen)
            return logits, chances / chances.sum(-1, keepdim=True), chosen

        return forward

    for layer in MIXTURES:
        handles.append(model.model.layers[layer].mlp.gate.register_forward_hook(hook(layer)))
    yield
    for handle in handles:
        handle.remove()


def test_replayed_experts_are_the_recorded_ones_and_their_gates_learn(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    batch = with_experts(make_batch())
    with forced(model, batch):
        wanted = oracle_logprobs(model, batch)
    loss = -(wanted * torch.from_numpy(batch.weight * batch.advantages)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for recompute in ("none", "full"):
        with make_learner(tmp_path, config(tokens=24, recompute=recompute)) as learner:
            found = learner.logprobs(batch)
            np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=0, atol=1e-5)
            assert np.abs(learner.logprobs(replace(batch, experts=None)) - found).max() > 0.01
            assert_same(gradients(learner, batch), oracle_gradients(model))


def test_what_is_replayed_is_counted_and_can_be_left_out(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    batch = with_experts(make_batch())
    assert batch.experts is not None
    last = np.isin(np.arange(batch.num_tokens), batch.cu_seqlens[1:] - 1)
    known = (batch.experts[:, 0] >= 0) & ~last
    seen: list[Tensor] = []
    with make_learner(tmp_path, config(tokens=100)) as learner:
        router = learner.model.module.decoder.layers[2].mlp.router
        handle = router.register_forward_hook(lambda *call: seen.append(call[2][1]))
        metrics = learner.train_step(batch)
        handle.remove()
        assert metrics["routing/replayed"] == known.sum()
        assert metrics["routing/unknown"] == (~known & ~last).sum()
    used = (
        seen[-1].nonzero()[:, 1].reshape(-1, TOP_K).numpy()
    )  # one microbatch: rows in some order, so compare as a bag
    replayed = np.sort(batch.experts.reshape(-1, LAYERS, TOP_K)[:, 2], -1)
    assert _bag(replayed[replayed[:, 0] >= 0]) <= _bag(used)
    with make_learner(tmp_path, config(replay_experts=False)) as learner:
        own = learner.logprobs(replace(batch, experts=None))
        assert np.array_equal(learner.logprobs(batch), own)
        assert "routing/replayed" not in learner.train_step(batch)


def _bag(rows: np.ndarray[Any, Any]) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, rows.tolist()))


def test_experts_of_another_model_are_refused_and_empty_ones_routed_anew(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    batch = with_experts(make_batch(), unknown=0.0)
    assert batch.experts is not None
    with make_learner(tmp_path, config()) as learner:
        with pytest.raises(LearnerError, match="expert 9"):
            learner.logprobs(replace(batch, experts=np.where(batch.experts == 3, 9, batch.experts).astype(np.int16)))
        with pytest.raises(LearnerError, match="4 expert ids"):
            learner.logprobs(replace(batch, experts=batch.experts[:, :4]))
        untold = replace(batch, experts=np.zeros_like(batch.experts))
        own = learner.logprobs(replace(batch, experts=None))
        assert np.array_equal(learner.logprobs(untold), own)
        assert learner.train_step(untold)["routing/replayed"] == 0


async def test_replay_makes_engine_and_learner_agree(tmp_path: Path) -> None:
    """Experts 0 and 1 are as good for the router; a difference of 1e-6 decides, one way in the engine, the other in the learner."""
    make_model("qwen3_moe", tmp_path / "engine")
    make_model("qwen3_moe", tmp_path / "learner")
    for place, sign in (("engine", 1), ("learner", -1)):
        path = tmp_path / place / "model.safetensors"
        weights = load_file(path)
        for name in [name for name in weights if name.endswith("mlp.gate.weight")]:
            noise = torch.randn(weights[name].shape[1], generator=torch.Generator().manual_seed(7))
            weights[name][1] = weights[name][0] + sign * 1e-6 * noise
        save_file(weights, path, metadata={"format": "pt"})
    rows: list[tuple[list[int], int, list[float], Int16Array]] = []
    async with running(tmp_path / "engine") as engine:
        for seed, prompt in enumerate(prompts(1, (5, 9, 14))):
            (one,) = await generate(
                engine, prompt, asked={"return_routed_experts": True}, max_new_tokens=30, sampling_seed=seed
            )
            experts = routed_experts(one, LAYERS, TOP_K).reshape(-1, LAYERS * TOP_K).astype(np.int16)
            unknown = np.full((1, experts.shape[1]), -1, np.int16)  # the last token was never fed
            rows.append(
                (prompt + one["output_ids"], len(prompt), output_logprobs(one), np.concatenate((experts, unknown)))
            )
    batch = _batch(rows)
    with make_learner(tmp_path / "learner", config()) as learner:
        gap = _gap(learner, batch)
        assert gap < 2e-5
        assert _gap(learner, replace(batch, experts=None)) > 1e-2
        assert learner.train_step(batch)["routing/unknown"] == 0


@pytest.mark.slow
async def test_a_routers_lease_brings_the_experts_of_every_token_to_the_learner(tmp_path: Path) -> None:
    """Two turns over HTTP on a real engine: recorded, leased, packed, replayed."""
    model_dir = tmp_path / "model"
    make_model("qwen3_moe", model_dir, vocab_size=TOKENIZER.size, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, model_dir / name)
    async with (
        serving(
            model_dir=model_dir,
            router=RouterConfig(record_experts=True),
            sampling=SamplingConfig(max_tokens=12),
            engine=EngineConfig(device="cpu"),
            buffer=BufferConfig(),
            buffer_path=tmp_path / "buffer.db",
        ) as url,
        RouterClient(url) as admin,
    ):
        opened = await admin.new_session(group_id="g", group_size=1)
        async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key) as client:
            turns: list[Any] = [{"role": "user", "content": "What is the code?"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=turns)
                turns += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
        await admin.finish(opened.session_id, reward=1.0)
        lease = await admin.lease(num_groups=1, step=0, wait_s=20)
    assert lease is not None
    config_ = config()
    packed = pack(lease.groups, advantage=config_.advantage, loss=config_.loss, max_row_tokens=1024)
    with make_learner(model_dir, config_) as learner:
        assert _gap(learner, packed.batch) < 2e-5
        metrics = learner.train_step(packed.batch)
    assert metrics["routing/unknown"] == 0
    assert metrics["routing/replayed"] == packed.batch.num_tokens - packed.batch.num_rows


def _gap(learner: Learner, batch: Batch) -> float:
    return float(np.abs(learner.logprobs(batch) - batch.rollout_logprobs).max())


def _batch(rows: list[tuple[list[int], int, list[float], Int16Array]]) -> Batch:
    batch = make_batch(lengths=[len(ids) for ids, *_ in rows])
    sampled = np.concatenate([np.arange(len(ids)) >= start for ids, start, *_ in rows])
    logprobs = np.zeros(batch.num_tokens, np.float32)
    logprobs[sampled] = np.concatenate([found for _, _, found, _ in rows])
    return replace(
        batch,
        token_ids=np.concatenate([ids for ids, *_ in rows]).astype(np.int32),
        loss_mask=sampled,
        rollout_logprobs=logprobs,
        temperature=np.ones(batch.num_tokens, np.float32),
        advantages=np.where(sampled, batch.advantages, 0).astype(np.float32),
        weight=np.where(sampled, np.float32(1 / sampled.sum()), np.float32(0)),
        num_sampled=int(sampled.sum()),
        experts=np.concatenate([experts for *_, experts in rows]),
    )
