"""Whole requests on the engine's thread: logprobs against transformers, batching, prefix reuse, a full cache, ends."""

import asyncio
from pathlib import Path

import pytest
import torch
from engine_inside import generate, oracle, output_logprobs, prompts, running
from tiny_models import make_model

from rlagent.errors import EngineError


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
async def test_logprobs_are_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(family, tmp_path, tied=tied)
    model.eval()
    async with running(tmp_path) as engine:
        asked = [(p, t) for p in prompts(0, (1, 3, 40, 70)) for t in (1.0, 0.6)]
        found = await asyncio.gather(*(generate(engine, p, temperature=t) for p, t in asked))
    for (prompt, temperature), (one,) in zip(asked, found, strict=True):
        expected = oracle(model, prompt, one["output_ids"], temperature)
        assert (expected - torch.tensor(output_logprobs(one))).abs().max() < 1e-5


async def test_a_batch_draws_what_each_request_draws_alone(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    asked = prompts(1, (5, 30, 9, 64, 2))
    async with running(tmp_path) as engine:
        together = await asyncio.gather(*(generate(engine, p, sampling_seed=i) for i, p in enumerate(asked)))
        await engine.call(engine.flush_cache)
        alone = [await generate(engine, p, sampling_seed=i) for i, p in enumerate(asked)]
    assert [one["output_ids"] for (one,) in together] == [one["output_ids"] for (one,) in alone]


async def test_the_next_turn_reuses_the_last_and_changes_nothing(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path).eval()
    (first,) = prompts(2, (40,))
    async with running(tmp_path) as engine:
        (turn,) = await generate(engine, first)
        second = first + turn["output_ids"] + [5, 6, 7]
        (again,) = await generate(engine, second)
        (mate,) = await generate(engine, [*first[:30], 9, 9, 9])
    assert turn["meta_info"]["cached_tokens"] == 0
    assert (
        again["meta_info"]["cached_tokens"] == len(first) + len(turn["output_ids"]) - 1
    )  # the last sampled id was never computed
    assert mate["meta_info"]["cached_tokens"] == 30
    expected = oracle(model, second, again["output_ids"], 1.0)
    assert (expected - torch.tensor(output_logprobs(again))).abs().max() < 1e-5


async def test_a_shared_prompt_is_computed_once(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    shared, *tails = prompts(3, (80, 4, 5, 6))
    async with running(tmp_path, prefill_tokens=1000) as engine:
        found = await asyncio.gather(*(generate(engine, shared + tail) for tail in tails))
    assert sorted(one["meta_info"]["cached_tokens"] for (one,) in found) == [0, 80, 80]


async def test_more_than_the_cache_holds_is_done_all_the_same(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path).eval()
    asked = prompts(4, (60,) * 10)
    async with running(tmp_path, max_total_tokens=256, max_running=4) as engine:
        found = await asyncio.gather(
            *(generate(engine, p, max_new_tokens=60, sampling_seed=i) for i, p in enumerate(asked))
        )
    for prompt, (one,) in zip(asked, found, strict=True):
        assert len(one["output_ids"]) == 60
        assert (oracle(model, prompt, one["output_ids"], 1.0) - torch.tensor(output_logprobs(one))).abs().max() < 1e-5


async def test_the_context_ends_a_sequence(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)  # 128 positions
    (prompt,) = prompts(5, (120,))
    async with running(tmp_path) as engine:
        (one,) = await generate(engine, prompt, max_new_tokens=8)
        with pytest.raises(EngineError, match="maximum context length of 128"):
            await generate(engine, prompt, max_new_tokens=9)
        with pytest.raises(EngineError, match="longer than the model's context"):
            await generate(engine, prompt * 2)
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


async def test_a_stop_id_is_the_last_of_the_output(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    (prompt,) = prompts(6, (10,))
    async with running(tmp_path) as engine:
        (free,) = await generate(engine, prompt, sampling_seed=1)
        stop = free["output_ids"][4]
        (one,) = await generate(engine, prompt, sampling_seed=1, stop_token_ids=[stop], ignore_eos=False)
    end = free["output_ids"].index(stop) + 1
    assert one["output_ids"] == free["output_ids"][:end]
    assert one["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_n_gives_different_draws_and_greedy_the_same(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    (prompt,) = prompts(7, (10,))
    async with running(tmp_path) as engine:
        drawn = await generate(engine, prompt, n=3)
        greedy = await generate(engine, prompt, n=2, temperature=0)
    assert len({tuple(one["output_ids"]) for one in drawn}) == 3
    assert greedy[0]["output_ids"] == greedy[1]["output_ids"]


async def test_many_prompts_compute_what_they_share_once(tmp_path: Path) -> None:
    """64 prompts of 100 tokens that share 75, in forwards that hold 8 of them: the shared part is computed once."""
    make_model("qwen3", tmp_path)
    (shared,) = prompts(8, (75,))
    async with running(tmp_path, max_running=64, max_total_tokens=64 * 128, prefill_tokens=800) as engine:
        found = await asyncio.gather(*(generate(engine, shared + tail) for tail in prompts(9, (25,) * 64)))
    first, *others = sorted(one["meta_info"]["cached_tokens"] for (one,) in found)
    assert first == 0
    assert 75 <= min(others) <= max(others) <= 80  # tails may begin alike
