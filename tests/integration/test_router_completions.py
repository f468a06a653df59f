"""OpenAI's completions with its SDK: prompts as text and as ids go on, token for token, from what was sampled."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import Reply
from router_harness import EOS, MODEL, TOKENIZER, Harness, always, in_turn, router, said

from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving

PROMPT = "<|im_start|>user\nWhat is the code?<|im_end|>\n<|im_start|>assistant\n"
TURN = "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


def client_of(r: Harness, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="agent", **options)


async def test_a_text_that_goes_on_keeps_the_sampled_ids(tmp_path: Path) -> None:
    letters = [TOKENIZER.encode(letter)[0] for letter in "The code"]  # not as the tokenizer would say it
    odd = Reply(ids=[*letters, EOS], finish={"type": "stop", "matched": EOS})
    async with router(tmp_path, in_turn(odd, said("two"), said("three"))) as r, client_of(r) as client:
        first = await client.completions.create(model="gpt-x", prompt=PROMPT, max_tokens=20)
        assert (first.choices[0].text, first.choices[0].finish_reason, first.model) == ("The code", "stop", "gpt-x")
        assert TOKENIZER.encode("<|im_start|>")[0] == r.engine.requests[0]["input_ids"][0]  # its own template
        text = f"{PROMPT}The code{TURN}"
        second = await client.completions.create(model="gpt-x", prompt=text)
        third = await client.completions.create(model="gpt-x", prompt=[f"{text}two{TURN}"])
        assert third.choices[0].text == "three"
        calls = await r.only_calls()
        assert [call["origin"] for call in calls] == ["fresh", "extended", "extended"]
        assert [call["prompt_ids"] for call in calls] == [request["input_ids"] for request in r.engine.requests]
        for parent, child in itertools.pairwise(calls):
            known = parent["prompt_ids"] + parent["choices"][0]["output_ids"]
            assert child["prompt_ids"][: len(known)] == known
        assert second.usage is not None
        assert second.usage.prompt_tokens == len(calls[1]["prompt_ids"])
        (session,) = await r.admin.sessions()
        (row,) = await r.admin.trajectories(session["session_id"])
        assert sum(row["loss_mask"]) == sum(len(call["choices"][0]["output_ids"]) for call in calls)


async def test_ids_that_go_on_extend_and_other_ids_of_the_same_text_do_not(tmp_path: Path) -> None:
    letters = [TOKENIZER.encode(letter)[0] for letter in "The code"]
    odd = Reply(ids=[*letters, EOS], finish={"type": "stop", "matched": EOS})
    prompt = TOKENIZER.encode(PROMPT)
    turn = TOKENIZER.encode(TURN)
    async with router(tmp_path, in_turn(odd, said("two"), said("three"))) as r, client_of(r) as client:
        await client.completions.create(model="m", prompt=prompt)
        await client.completions.create(model="m", prompt=[*prompt, *letters, *turn])
        await client.completions.create(model="m", prompt=[[*prompt, *TOKENIZER.encode("The code"), *turn]])
        assert [request["input_ids"] for request in r.engine.requests] == [
            prompt,
            [*prompt, *letters, *turn],
            [*prompt, *TOKENIZER.encode("The code"), *turn],
        ]
        calls = await r.only_calls()
        assert [(call["origin"], call["reason"]) for call in calls] == [
            ("fresh", "first"),
            ("extended", ""),
            ("fresh", "ids_differ"),
        ]
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            await client.completions.create(model="m", prompt=[10**6])


async def test_a_stop_string_stays_in_the_history_that_goes_on_with_it(tmp_path: Path) -> None:
    stopped = Reply(
        ids=TOKENIZER.encode("Look it up.\nObservation:"), finish={"type": "stop", "matched": "Observation:"}
    )
    async with router(tmp_path, in_turn(stopped, said("7"))) as r, client_of(r) as client:
        first = await client.completions.create(model="m", prompt="Q: code?\n", stop=["Observation:"])
        assert first.choices[0].text == "Look it up.\n"
        await client.completions.create(model="m", prompt=f"Q: code?\n{first.choices[0].text}Observation: 7\n")
        await client.completions.create(model="m", prompt=f"Q: code?\n{first.choices[0].text}Something else")
        calls = await r.only_calls()
        assert [(call["origin"], call["reason"]) for call in calls[1:]] == [("extended", ""), ("fresh", "edited")]


async def test_n_logprobs_and_streaming(tmp_path: Path) -> None:
    thought = "<think>\nHm.\n</think>\nSeven"  # a completion is text: nothing is taken out of it
    async with router(tmp_path, in_turn(said(thought), said("two"), said(thought))) as r, client_of(r) as client:
        found = await client.completions.create(model="m", prompt=PROMPT, n=2, logprobs=1)
        assert {choice.text for choice in found.choices} == {thought, "two"}
        for choice in found.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None
            assert choice.logprobs.text_offset is not None
            assert "".join(choice.logprobs.tokens) == choice.text
            assert choice.logprobs.text_offset[-1] == len(choice.text) - len(choice.logprobs.tokens[-1])
            assert set(choice.logprobs.token_logprobs or []) == {-0.5}
        stream = await client.completions.create(
            model="m", prompt=PROMPT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == thought
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None


async def test_the_sync_client_and_raw_responses(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:

        def agent() -> Any:
            with openai.OpenAI(base_url=f"{r.url}/v1", api_key="agent") as client:
                return client.completions.with_raw_response.create(model="m", prompt=PROMPT)

        raw = await asyncio.to_thread(agent)
        assert raw.parse().id == raw.headers["x-request-id"]
        assert raw.parse().choices[0].text == "ok"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
async def test_what_cannot_be_honoured_is_400_and_names_the_field(
    tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        headers = {"authorization": "Bearer agent"}
        response = await r.http.post("/v1/completions", json={"model": "m", "prompt": "x", **body}, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert r.engine.requests == []


async def test_the_forest_of_texts_survives_a_restart(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("one"))) as r, client_of(r) as client:
        await client.completions.create(model="m", prompt=PROMPT)
    async with router(tmp_path, always(said("two"))) as r, client_of(r) as client:
        await client.completions.create(model="m", prompt=f"{PROMPT}one{TURN}")
        assert [call["origin"] for call in await r.only_calls()] == ["fresh", "extended"]


@pytest.mark.slow
async def test_an_agent_on_the_embedded_engine_is_recorded_exactly(tmp_path: Path) -> None:
    async with serving(
        model_dir=MODEL, router=RouterConfig(), sampling=SamplingConfig(max_tokens=200),
        engine=EngineConfig(max_total_tokens=8192), buffer=BufferConfig(), buffer_path=tmp_path / "buffer.db",
    ) as url:  # fmt: skip
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client:
            text = PROMPT
            for _ in range(3):
                found = await client.completions.create(model="m", prompt=text, max_tokens=200)
                text += found.choices[0].text + TURN
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            (session,) = (await http.get("/sessions")).json()["sessions"]
            calls = (await http.get(f"/sessions/{session['session_id']}/calls")).json()["calls"]
    assert [call["origin"] for call in calls] == ["fresh", "extended", "extended"]
    for parent, child in itertools.pairwise(calls):
        known = parent["prompt_ids"] + parent["choices"][0]["output_ids"]
        assert child["prompt_ids"][: len(known)] == known
