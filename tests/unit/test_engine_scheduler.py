"""The engine's scheduler and thread: growth, retraction, who waits for whom, prefill in pieces, a step that fails."""

import asyncio
from pathlib import Path

import pytest
import torch
from engine_inside import generate, oracle, output_logprobs, prompts, running
from engine_process import widen_context
from tiny_models import make_model

from rlagent.engine.requests import GenerateRequest
from rlagent.engine.sampling import SamplingParams
from rlagent.engine.sequence import Progress, Sequence
from rlagent.engine.stops import Stop
from rlagent.errors import EngineError


async def test_rows_grow_and_those_without_room_are_computed_again(tmp_path: Path) -> None:
    """600 tokens of cache: four rows of 128, then two of 256, then one of 512; every sequence outgrows a row."""
    make_model("qwen3", tmp_path)
    widen_context(tmp_path, 512)
    model = make_model("qwen3", tmp_path / "reference").eval()
    asked = prompts(0, (20, 60, 90, 100, 30))
    async with running(tmp_path, max_total_tokens=600, max_running=4) as engine:
        found = await asyncio.gather(
            *(generate(engine, p, max_new_tokens=200 + 40 * i, sampling_seed=i) for i, p in enumerate(asked))
        )
    assert sum(one["meta_info"]["num_retractions"] for (one,) in found) >= 2
    for index, (prompt, (one,)) in enumerate(zip(asked, found, strict=True)):
        assert len(one["output_ids"]) == 200 + 40 * index
        gap = oracle(model, prompt, one["output_ids"], 1.0) - torch.tensor(output_logprobs(one))
        assert gap.abs().max() < 2e-5


async def test_the_cache_can_be_smaller_than_the_context(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    widen_context(tmp_path, 4096)
    async with running(tmp_path, max_total_tokens=300) as engine:
        (one,) = await generate(engine, [1, 2, 3], max_new_tokens=297)
        assert len(one["output_ids"]) == 297
        with pytest.raises(EngineError, match="maximum context length of 300"):
            await generate(engine, [1, 2, 3], max_new_tokens=298)


async def test_a_failed_step_ends_everything_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    async with running(tmp_path) as engine:
        await engine.call(lambda: engine.pause("retract"))
        running_then = asyncio.create_task(generate(engine, [1, 2, 3]))
        await asyncio.sleep(0)
        await engine.call(engine._cache.release)  # the memory is gone, and the engine does not know it
        await engine.call(engine.resume)
        (one,) = await running_then
        assert one["meta_info"]["finish_reason"]["type"] == "abort"
        assert "engine failed" in one["meta_info"]["finish_reason"]["message"]
        assert not engine.healthy
        with pytest.raises(EngineError, match="restart"):
            await generate(engine, [1, 2, 3])
        with pytest.raises(EngineError, match="restart"):
            await engine.call(engine.flush_cache)


async def test_what_was_on_its_way_when_a_step_failed_is_answered(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    async with running(tmp_path) as engine:
        await engine.call(lambda: engine.pause("retract"))
        ended: asyncio.Queue[Progress] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(progress: Progress) -> None:
            loop.call_soon_threadsafe(ended.put_nowait, progress)

        request = GenerateRequest.parse({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 9}}, engine)
        # All in the queue at once: the failing step comes between.
        engine.submit(request.sequences(emit)[0])
        broken = engine.call(engine._cache.release)
        resumed = engine.call(engine.resume)
        flushed = [asyncio.ensure_future(engine.call(engine.flush_cache)) for _ in range(3)]
        await asyncio.gather(broken, resumed)
        engine_results = await asyncio.gather(*flushed, return_exceptions=True)
        assert all(isinstance(r, EngineError | bool) for r in engine_results)
        stop = (await ended.get()).stop
    assert stop is not None
    assert stop.kind == "abort"


def test_progress_stays_that_of_its_step() -> None:
    """The HTTP side reads it while the engine's thread goes on."""
    told: list[Progress] = []
    params = SamplingParams.parse({"max_new_tokens": 3})
    seq = Sequence(rid="r", ids=[5, 6], prompt_len=2, params=params, seed=0, emit=told.append)
    seq.append(7, -0.5, "1")
    seq.tell("1")
    seq.append(8, -0.25, "2")
    seq.stop = Stop("length", 2)
    seq.tell("2")
    first, last = told
    assert (first.output, first.logprobs, first.meta_info()["completion_tokens"]) == ([7], [-0.5], 1)
    assert (first.meta_info()["finish_reason"], first.meta_info()["weight_version"]) == (None, "1")
    assert "weight_versions" not in first.meta_info()
    assert last.meta_info()["weight_versions"] == [
        {"version": "1", "start": 0, "end": 1},
        {"version": "2", "start": 1, "end": 2},
    ]


async def test_a_long_prompt_is_computed_in_pieces_beside_the_others(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    widen_context(tmp_path, 1024)
    model = make_model("qwen3", tmp_path / "reference").eval()
    long, short = prompts(1, (500, 4))
    async with running(tmp_path, prefill_tokens=16) as engine:
        (a,), (b,) = await asyncio.gather(generate(engine, long), generate(engine, short))
    for prompt, one in ((long, a), (short, b)):
        gap = oracle(model, prompt, one["output_ids"], 1.0) - torch.tensor(output_logprobs(one))
        assert gap.abs().max() < 2e-5


async def test_no_more_than_max_running_run(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    most = 0
    async with running(tmp_path, max_running=3) as engine:
        step = engine.scheduler.step

        def counted() -> None:
            nonlocal most
            step()
            most = max(most, len(engine.scheduler.running))

        engine.scheduler.step = counted  # type: ignore[method-assign]
        await asyncio.gather(*(generate(engine, p) for p in prompts(2, (9,) * 8)))
    assert most == 3
