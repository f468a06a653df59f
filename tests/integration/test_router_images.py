"""Images in messages: passed on to an engine that can see, recorded once, known again, and refused with a reason where nobody can.

The engine is scripted and repeats placeholders as SGLang does; tests/sglang/test_sglang_images.py asks a real one.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from fake_engine import Reply, Script
from rich.console import Console
from router_harness import MODEL, Harness, always, error_of, in_turn, router, said
from vision_model import png, uri, vision_directory

from rlagent.inspect import show
from rlagent.recorded_session import read
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.router.tokenizer import Tokenizer

RED, BLUE = png(255), png(0, 0, 255)
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_directory(tmp_path_factory.mktemp("vision") / "model")


@asynccontextmanager
async def seeing(
    directory: Path, model: Path, script: Script, config: RouterConfig | None = None, *, max_tokens: int = 32
) -> AsyncIterator[Harness]:
    async with router(
        directory, script, model=model, config=config, sampling=SamplingConfig(max_tokens=max_tokens)
    ) as r:
        r.engine.image_tokens = (placeholder(model), NUM_TOKENS)
        yield r


def placeholder(model: Path) -> int:
    (found,) = Tokenizer.load(model).encode_plain("<|image_pad|>")
    return found


def shown(*parts: str | bytes) -> Any:
    """A user's message in chat's form."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": uri(part)}}
            for part in parts
        ],
    }


def sent_images(r: Harness) -> list[Sequence[str]]:
    return [request.get("image_data", ()) for request in r.engine.requests]


async def test_an_image_is_passed_on_recorded_and_goes_on_in_the_next_turn(tmp_path: Path, model: Path) -> None:
    async with seeing(tmp_path, model, in_turn(said("Red."), said("Both."))) as r:
        first = await r.chat([shown("What ", RED, " is it?")])
        body = first.json()
        history = [shown("What ", RED, " is it?"), body["choices"][0]["message"], shown(BLUE, RED)]
        second = await r.chat(history)
        assert sent_images(r) == [[uri(RED)], [uri(RED), uri(BLUE), uri(RED)]]
        calls = await r.calls(first)
        ids = calls[0]["prompt_ids"]
        assert r.engine.requests[0]["input_ids"] == ids
        (image,) = calls[0]["images"]
        assert ids[image["position"]] == placeholder(model)
        assert image["num_tokens"] == NUM_TOKENS
        assert body["usage"]["prompt_tokens"] == len(ids) - 1 + NUM_TOKENS == calls[0]["num_prompt_tokens"]
        assert calls[1]["origin"] == "extended"
        sampled = calls[0]["choices"][0]["output_ids"]
        assert calls[1]["prompt_ids"][: len(ids) + len(sampled)] == [*ids, *sampled]
        blue, red = calls[1]["images"]
        assert red["digest"] == image["digest"] != blue["digest"]
        assert second.json()["usage"]["prompt_tokens"] == len(calls[1]["prompt_ids"]) + 3 * (NUM_TOKENS - 1)
        content = calls[0]["messages"][0]["content"]
        assert [part["type"] for part in content] == ["text", "image", "text"]
        assert content[1]["digest"] == image["digest"]


async def test_another_image_at_the_same_place_is_another_history(tmp_path: Path, model: Path) -> None:
    async with seeing(tmp_path, model, always(said("Red."))) as r:
        answer = (await r.chat([shown(RED)])).json()["choices"][0]["message"]
        await r.chat([shown(BLUE), answer, shown("Sure?")])
        await r.chat([shown(RED), answer, shown("Sure?")])
        calls = await r.only_calls()
        assert [(call["origin"], call["reason"]) for call in calls[1:]] == [("fresh", "edited"), ("extended", "")]


async def test_all_dialects_say_the_same_with_images(tmp_path: Path, model: Path) -> None:
    data = base64.b64encode(RED).decode()
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    async with (
        seeing(tmp_path, model, always(said("Red."))) as r,
        openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="agent") as client,
        anthropic.AsyncAnthropic(base_url=r.url, api_key="agent") as claude,
    ):
        chat = await client.chat.completions.create(model="m", messages=[shown("See ", RED)])
        parts: Any = [
            {"type": "input_text", "text": "See "},
            {"type": "input_image", "image_url": uri(RED), "detail": "low"},
        ]
        response = await client.responses.create(model="m", input=[{"role": "user", "content": parts}])
        content: Any = [{"type": "text", "text": "See "}, block]
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": content}]}
        message = await claude.messages.create(**asked, max_tokens=9)
        counted = await claude.messages.count_tokens(**asked)
        first, *others = await r.only_calls()
        assert all(call["prompt_ids"] == first["prompt_ids"] and call["images"] == first["images"] for call in others)
        assert chat.usage is not None
        assert response.usage is not None
        lengths = (
            chat.usage.prompt_tokens,
            response.usage.input_tokens,
            message.usage.input_tokens,
            counted.input_tokens,
        )
        assert lengths == (len(first["prompt_ids"]) - 1 + NUM_TOKENS,) * 4
        again = await client.responses.create(model="m", input="Sure?", previous_response_id=response.id)
        assert sent_images(r)[-1] == [uri(RED)]
        assert (await r.only_calls())[-1]["origin"] == "extended"
        assert again.usage is not None
        async with claude.messages.stream(**asked, max_tokens=9) as stream:
            assert (await stream.get_final_message()).usage.input_tokens == lengths[0]


async def test_images_in_tool_results(tmp_path: Path, model: Path) -> None:
    data = base64.b64encode(BLUE).decode()
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    async with seeing(tmp_path, model, always(said("Blue."))) as r:
        await r.chat(
            [
                shown("Look."),
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": shown("seen: ", BLUE)["content"]},
            ]
        )
        items = [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "seen: "}, {"type": "input_image", "image_url": uri(BLUE)}],
            },
        ]
        await r.http.post(
            "/v1/responses", json={"model": "policy", "input": items}, headers={"authorization": "Bearer agent"}
        )
        result = {
            "type": "tool_result",
            "tool_use_id": "call_1",
            "content": [{"type": "text", "text": "seen: "}, image],
        }
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        await r.http.post(
            "/v1/messages",
            json={"model": "policy", "max_tokens": 9, "messages": messages},
            headers={"x-api-key": "agent"},
        )
        first, *others = await r.only_calls()
        assert len(others) == 2
        assert all(call["prompt_ids"] == first["prompt_ids"] for call in others)
        assert sent_images(r) == [[uri(BLUE)]] * 3


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/a.png", "the router fetches nothing"),
        ("file:///etc/passwd", "the router fetches nothing"),
        ("data:image/png,abc", "data:image/png;base64"),
        ("data:image/png;base64,AAAA", "no PNG, JPEG, GIF or WebP image"),
        ("data:image/png;base64,A!", "not valid base64"),
    ],
)
async def test_what_is_no_image_is_refused_with_the_fix(tmp_path: Path, model: Path, url: str, says: str) -> None:
    async with seeing(tmp_path, model, always(said("x"))) as r:
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        refused = await r.chat([message])
        assert refused.status_code == 400
        assert says in error_of(refused)["message"]
        assert r.engine.requests == []


async def test_limits_name_themselves(tmp_path: Path, model: Path) -> None:
    config = RouterConfig(max_images=1, max_image_bytes=len(RED))
    async with seeing(tmp_path, model, always(said("x")), config) as r:
        many = await r.chat([shown(RED, RED)])
        assert (many.status_code, error_of(many)["code"]) == (400, "too_many_images")
        assert "router.max_images is 1" in error_of(many)["message"]
        large = await r.chat([shown(png(1, 2, 3, width=900))])
        assert (large.status_code, error_of(large)["code"]) == (413, "image_too_large")
        assert "router.max_image_bytes" in error_of(large)["message"]
        assert (await r.chat([shown(RED)])).status_code == 200
    config = RouterConfig(max_body_bytes=4 * len(RED))
    async with seeing(tmp_path / "all", model, always(said("x")), config) as r:
        headers = {"authorization": "Bearer agent"}
        message = {"role": "user", "content": [{"type": "input_image", "image_url": uri(RED)}]}
        asked: Any = {"model": "m", "input": [message]}
        for status in (200, 200, 200, 200, 413):  # each body is small, the history is not
            answer = await r.http.post("/v1/responses", json=asked, headers=headers)
            assert answer.status_code == status
            asked["previous_response_id"] = answer.json().get("id")
        assert "router.max_body_bytes" in error_of(answer)["message"]


async def test_a_text_model_says_so_to_every_sdk(tmp_path: Path) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    async with (
        router(tmp_path, always(said("x"))) as r,
        openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="agent") as client,
        anthropic.AsyncAnthropic(base_url=r.url, api_key="agent") as claude,
    ):
        image: Any = {"type": "input_image", "image_url": uri(RED), "detail": "auto"}
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        for call in (
            client.chat.completions.create(model="m", messages=[shown(RED)]),
            client.responses.create(model="m", input=[{"role": "user", "content": [image]}]),
            claude.messages.create(**asked, max_tokens=9),
            claude.messages.count_tokens(**asked),
        ):
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="the policy is a text model"):
                await call
        assert r.engine.requests == []


async def test_an_engine_that_cannot_see_says_so(tmp_path: Path, model: Path) -> None:
    async with router(tmp_path / "blind", always(said("x")), model=model) as r:
        refused = await r.chat([shown(RED)])
        assert (refused.status_code, error_of(refused)["code"]) == (400, "no_vision")
        assert "an engine that runs it does not" in error_of(refused)["message"]


async def test_a_template_that_leaves_an_image_out_is_refused(tmp_path: Path, model: Path) -> None:
    blind = tmp_path / "blind"
    shutil.copytree(model, blind)
    shutil.copy(MODEL / "chat_template.jinja", blind)  # it knows text only
    async with seeing(tmp_path, blind, always(said("x"))) as r:
        refused = await r.chat([shown(RED, "what?")])
        assert refused.status_code == 400
        assert "does not show all of 1 images" in error_of(refused)["message"]


async def test_an_interrupted_call_goes_on_with_its_images(tmp_path: Path, model: Path) -> None:
    whole = said("one two three")
    cut = replace(whole, ids=whole.ids[:3], finish={"type": "abort"})
    odd = replace(cut, ids=[placeholder(model)])
    rest = replace(whole, ids=whole.ids[3:])
    async with seeing(tmp_path, model, in_turn(cut, rest, odd)) as r:
        answer = await r.chat([shown(RED)])
        assert answer.json()["choices"][0]["message"]["content"] == "one two three"
        first, second = r.engine.requests
        assert second["image_data"] == first["image_data"]
        assert second["input_ids"] == [*first["input_ids"], *cut.ids]
        (call,) = await r.only_calls()
        assert [image["num_tokens"] for image in call["images"]] == [NUM_TOKENS]
        refused = await r.chat([shown(BLUE)])
        assert (refused.status_code, error_of(refused)["code"]) == (500, "engine_failed")
        assert "sampled an image's placeholder" in error_of(refused)["message"]


async def test_what_a_large_image_leaves_no_room_for_is_cut(tmp_path: Path, model: Path) -> None:
    refusal = replace(
        said("x"), refusal="Requested token count exceeds the model's maximum context length of 4096 tokens."
    )

    def script(body: dict[str, Any]) -> Reply:
        return refusal if body["sampling_params"]["max_new_tokens"] > 100 else said("x")

    async with seeing(tmp_path, model, script, max_tokens=999) as r:
        r.engine.image_tokens = (placeholder(model), 4000)
        answer = await r.chat([shown(RED)])
        (call,) = await r.only_calls()
        assert answer.json()["usage"]["prompt_tokens"] == call["num_prompt_tokens"] == len(call["prompt_ids"]) + 3999
        asked = [request["sampling_params"]["max_new_tokens"] for request in r.engine.requests]
        assert asked == [999, 1, 4096 - call["num_prompt_tokens"]]


async def test_a_prompt_that_the_engine_changed_is_not_recorded(tmp_path: Path, model: Path) -> None:
    async with seeing(tmp_path, model, always(said("x"))) as r:
        r.engine.retokenizes = True
        refused = await r.chat([shown("see", RED)])
        assert (refused.status_code, error_of(refused)["code"]) == (500, "recording_failed")
        assert await r.only_calls() == []


async def test_a_sampled_placeholder_is_no_image(tmp_path: Path, model: Path) -> None:
    tokens = Tokenizer.load(model)
    odd = replace(said("x"), ids=[placeholder(model), *said("x").ids])
    async with seeing(tmp_path, model, in_turn(odd, said("y"))) as r:
        answer = (await r.chat([shown(RED)])).json()["choices"][0]["message"]
        assert "<|image_pad|>" in answer["content"]
        await r.chat([shown(RED), answer, shown("Go on.")])
        calls = await r.only_calls()
        assert calls[1]["reason"] == "image_sampled"
        assert calls[1]["prompt_ids"].count(placeholder(model)) == 1
        assert tokens.decode(calls[1]["prompt_ids"]).count("<|image_pad|>") == 2  # the other is text


async def test_a_rollout_with_images_is_left_out_of_training_and_counted(tmp_path: Path, model: Path) -> None:
    async with seeing(tmp_path, model, always(said("x"))) as r:
        for key, messages in (("one", [shown(RED)]), ("two", [shown("text")])):
            session = await r.session_of(await r.chat(messages, key=key))
            finished = await r.admin.finish(session, reward=1.0)
            assert ("images" in (finished["warning"] or "")) is (key == "one")
            (row,) = await r.admin.trajectories(session)
            assert any(row["loss_mask"]) is (key == "two")
        ledger = {(entry.event, entry.reason): entry.count for entry in (await r.admin.status()).ledger}
        assert ledger["rollout_dropped", "images"] == 1


async def test_inspect_shows_an_image_as_one_marked_place(tmp_path: Path, model: Path) -> None:
    async with seeing(tmp_path, model, in_turn(said("Red."), said("Blue."))) as r:
        first = await r.chat([shown("Look ", RED)])
        answer = first.json()["choices"][0]["message"]
        session = await r.session_of(await r.chat([shown("Look ", RED), answer, shown(BLUE)]))
        recorded = await read(r.url, session, admin_key=None, model=None)
    console = Console(record=True, width=160, file=StringIO(), force_terminal=True, color_system="truecolor")
    show(recorded, console)
    text = console.export_text()
    for image in (RED, BLUE):
        assert text.count(f"[image {sha256(image).hexdigest()[:8]}, {NUM_TOKENS} tokens]") == 1
    assert "image_pad" not in text


async def test_the_bytes_of_an_image_are_kept_once_and_shown_to_who_may_read_the_session(
    tmp_path: Path, model: Path
) -> None:
    async with seeing(tmp_path, model, always(said("x"))) as r:
        first = await r.chat([shown(RED, RED)])
        await r.chat([shown(RED)], key="other")
        session = await r.session_of(first)
        digest = (await r.calls(first))[0]["images"][0]["digest"]
        path = f"/sessions/{session}/images/{digest}"
        found = await r.http.get(path, headers={"authorization": "Bearer agent"})
        assert (found.content, found.headers["content-type"]) == (RED, "image/png")
        assert (await r.http.get(path, headers={"authorization": "Bearer other"})).status_code in (401, 403)
        assert (await r.http.get(path[:-1] + "x", headers={"authorization": "Bearer agent"})).status_code == 404
