"""The engine without HTTP: logprobs against transformers, batching, prefix reuse, stops, sampling, a full cache."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, make_model

from rlagent.engine.architecture import Architecture
from rlagent.engine.cache import KVCache
from rlagent.engine.config import EngineConfig
from rlagent.engine.loop import Engine
from rlagent.engine.model import Model
from rlagent.engine.requests import GenerateRequest, answer
from rlagent.engine.sampling import SamplingParams, sample
from rlagent.engine.sequence import Sequence
from rlagent.errors import EngineError, LoadError

Answer = dict[str, Any]


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Engine]:
    engine = Engine.load(
        EngineConfig(**{"max_running": 8, "max_total_tokens": 4096, "prefill_tokens": 32, **options}), directory, "0"
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


async def generate(engine: Engine, prompt: list[int], **params: Any) -> list[Answer]:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def emit(sequence: Sequence) -> None:
        if sequence.stop is not None:
            loop.call_soon_threadsafe(ended.set)

    body = {
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 20, "ignore_eos": True, **params},
    }
    request = GenerateRequest.parse(body, engine)
    sequences = request.sequences(emit)
    for sequence in sequences:
        engine.submit(sequence)
    while any(sequence.stop is None for sequence in sequences):
        await ended.wait()
        ended.clear()
    return [answer(request, sequence, engine, sequence.output) for sequence in sequences]


def logprobs_of(found: Answer) -> list[float]:
    return [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]


def oracle(model: Any, prompt: list[int], output: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]


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
        assert (expected - torch.tensor(logprobs_of(one))).abs().max() < 1e-5


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
    assert (expected - torch.tensor(logprobs_of(again))).abs().max() < 1e-5


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
        assert (oracle(model, prompt, one["output_ids"], 1.0) - torch.tensor(logprobs_of(one))).abs().max() < 1e-5


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
        (one,) = await generate(engine, prompt, sampling_seed=1, stop_token_ids=[stop])
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


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [[]]}, "empty prompt"),
        ({"input_ids": [VOCAB]}, f"vocabulary of {VOCAB}"),
        ({"input_ids": [True]}, "True"),
        ({"text": "hi"}, "no tokenizer"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"n": "x"}}, "sampling_params"),
    ],
)
async def test_a_bad_request_is_refused_with_the_reason(tmp_path: Path, body: dict[str, Any], words: str) -> None:
    make_model("qwen3", tmp_path)
    async with running(tmp_path) as engine:
        with pytest.raises(EngineError, match=words):
            GenerateRequest.parse(body, engine)


def test_a_directory_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json"):
        Architecture.load(tmp_path)
    make_model("qwen3", tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("Qwen3ForCausalLM", "GPT2LMHeadModel"))
    with pytest.raises(LoadError, match="GPT2LMHeadModel"):
        Architecture.load(tmp_path)


# Sampling


def draw(logits: list[float], count: int, **params: Any) -> tuple[np.ndarray, float]:
    """Frequencies over many seeds, and the logprob reported for the last draw's id."""
    rows = torch.tensor([logits]).repeat(count, 1)
    ids, logprobs = sample(rows, [SamplingParams.parse(params)] * count, list(range(count)), [3] * count)
    return np.bincount(ids, minlength=len(logits)) / count, logprobs[-1] - np.log(
        max(1e-9, np.bincount(ids, minlength=len(logits))[ids[-1]] / count)
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"min_p": 0.29}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
    ],
)
def test_frequencies_and_logprobs_are_the_distributions(params: dict[str, Any], expected: list[float]) -> None:
    frequencies, gap = draw(np.log([0.5, 0.25, 0.15, 0.1]).tolist(), 20000, **params)
    assert frequencies == pytest.approx(expected, abs=0.02)
    if params.get("temperature") != 0:  # a greedy draw reports the full distribution's logprob
        assert abs(gap) < 0.1


# The cache's rows


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "finish", "flush"]), st.integers(0, 5), st.integers(1, 30)), max_size=40
    )
)
@settings(deadline=None, max_examples=60)
def test_a_row_always_holds_what_it_says(actions: list[tuple[str, int, int]]) -> None:
    """Against a simple model: keys are the token ids themselves, so a row's content shows where it came from."""
    architecture = Architecture(
        family="Qwen3ForCausalLM", num_layers=1, hidden=4, num_heads=1, num_kv_heads=1, head_dim=4, intermediate=4, vocab_size=9,
        norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=False, context=64, rope={}, eos_ids=(),
    )  # fmt: skip
    cache = KVCache(
        architecture, max_running=2, max_total_tokens=5 * 64, dtype=torch.float32, device=torch.device("cpu")
    )
    running_rows: list[np.ndarray] = []

    def check() -> None:
        for row in range(cache.num_rows):
            length = int(cache._lengths[row])
            held = cache._keys[0][row, 0, :length, 0].numpy().astype(np.int32)
            assert (held == cache._tokens[row, :length]).all()

    for action, which, length in actions:
        if action == "start" and len(running_rows) < cache.max_running:
            prompt = np.array([1 + which % 3] * length + [which, 7, 8], dtype=np.int32)[:60]
            source, shared = cache.match(prompt)
            row = len(running_rows)
            cache.start(row, source, shared)
            assert (cache._keys[0][row, 0, :shared, 0].numpy() == prompt[:shared]).all()
            plan = cache.plan([row] * (len(prompt) - shared), torch.arange(shared, len(prompt)), [])
            fresh = torch.tensor(prompt[shared:], dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 4)
            cache.write(0, plan, fresh, fresh)
            cache.computed(row, prompt)
            running_rows.append(prompt)
        elif action == "finish" and running_rows:
            row = which % len(running_rows)
            cache.finish(row, running_rows[row], len(running_rows), retain=length % 2 == 0)
            last = running_rows.pop()
            if row < len(running_rows):
                running_rows[row] = last
        elif action == "flush":
            cache.flush()
        for row, tokens in enumerate(running_rows):
            assert (cache._keys[0][row, 0, : len(tokens), 0].numpy() == tokens).all()
        check()


def test_the_model_knows_its_weights_by_their_names(tmp_path: Path) -> None:
    reference = make_model("qwen2", tmp_path, tied=False)
    model = Model(Architecture.load(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    named = {name: tuple(tensor.shape) for name, tensor in model.parameters_by_name().items()}
    assert named == {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
