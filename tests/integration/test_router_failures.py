"""Engines that abort, die or are not there, and prompts that do not fit."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from fake_engine import Reply
from router_harness import EOS, MODEL, TOKENIZER, always, error_of, in_turn, router, said

from rlagent.router.config import SamplingConfig


async def test_an_abort_by_the_engine_is_resumed_with_two_version_spans(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("one two three")
    first = Reply(ids=ids[:2], finish={"type": "abort", "message": "paused"})
    rest = Reply(
        ids=[*ids[2:], EOS],
        finish={"type": "stop", "matched": EOS},
        spans=[{"version": "3", "start": 0, "end": len(ids) - 1}],
    )
    for stream in (False, True):
        async with router(tmp_path / str(stream), in_turn(first, rest)) as r:
            response = await r.chat(stream=stream, max_tokens=20)
            (call,) = await r.calls(response)
            (choice,) = call["choices"]
            assert choice["output_ids"] == [*ids, EOS]
            assert [(s["version"], s["start"], s["end"]) for s in choice["versions"]] == [
                (0, 0, 2),
                (3, 2, len(ids) + 1),
            ]
            resumed = r.engine.requests[1]
            assert resumed["input_ids"] == call["prompt_ids"] + ids[:2]
            assert resumed["sampling_params"]["max_new_tokens"] == 18


async def test_a_stop_string_across_a_resume_still_stops(tmp_path: Path) -> None:
    first = Reply(ids=TOKENIZER.encode("The ST"), finish={"type": "abort", "message": "paused"})
    rest = Reply(ids=[TOKENIZER.encode(letter)[0] for letter in "OP over"], finish={"type": "length", "length": 7})
    async with router(tmp_path, in_turn(first, rest)) as r:
        response = await r.chat(stop="STOP")
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("The ", "stop")
        (call,) = await r.calls(response)
        assert TOKENIZER.decode(call["choices"][0]["output_ids"]) == "The STOP"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_in_mid_call_moves_the_call_to_another(tmp_path: Path, stream: bool) -> None:
    dying = said("one two three", drop=True)
    async with router(tmp_path, always(dying), always(said("fine"))) as r:
        for _ in range(2):  # whichever engine is asked first
            response = await r.chat(stream=stream, key=f"k{_}")
            assert response.status_code == 200
            (call,) = await r.calls(response)
            assert TOKENIZER.decode(call["choices"][0]["output_ids"]).endswith("fine<|im_end|>")


async def test_a_whole_answer_keeps_what_a_dead_engine_had_told(tmp_path: Path) -> None:
    dying, rest = said("one two three", drop=True, held_ids=2), said(" and the rest")
    script = in_turn(dying, rest)
    async with router(tmp_path, script, script) as r:  # whichever engine is asked first
        (call,) = await r.calls(await r.chat())
        (choice,) = call["choices"]
        told = list(dying.ids[:1])  # the first token is told at once, the next ones after an interval
        assert choice["output_ids"] == told + list(rest.ids)
        assert choice["versions"] == [{"version": 0, "start": 0, "end": len(choice["output_ids"])}]
        (resumed,) = [q for engine in r.engines for q in engine.requests if q["input_ids"] != call["prompt_ids"]]
        assert resumed["input_ids"] == call["prompt_ids"] + told
        assert resumed["sampling_params"]["max_new_tokens"] == 31


async def test_no_engine_is_503_with_retry_and_leaves_no_record(tmp_path: Path) -> None:
    async with router(tmp_path, always(Reply(ids=[], status=500))) as r:
        for stream in (False, True):
            response = await r.chat(stream=stream)
            assert response.status_code == 503
            assert response.headers["x-should-retry"] == "true"
            assert await r.calls(response) == []


async def test_context_overflow_is_not_retried(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        response = await r.chat([{"role": "user", "content": "7 " * 1100}])
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert response.headers["x-should-retry"] == "false"
        assert r.engine.requests == []


async def test_a_completion_is_bounded_by_the_context(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok")), sampling=SamplingConfig(max_tokens=4096)) as r:
        await r.chat()
        request = r.engine.requests[0]
        assert request["sampling_params"]["max_new_tokens"] == 1024 - len(request["input_ids"])


def test_the_demo_model_has_the_context_that_these_tests_assume() -> None:
    assert orjson.loads((MODEL / "config.json").read_bytes())["max_position_embeddings"] == 1024
