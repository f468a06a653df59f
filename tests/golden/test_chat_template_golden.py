"""Our renderer gives, character for character and id for id, what transformers' apply_chat_template gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from templates import GOLDEN, MODEL, renderer
from transformers import PreTrainedTokenizerFast
from vision_model import png, uri, vision_directory

from rlagent.errors import LoadError
from rlagent.router.chat_template import ChatTemplate
from rlagent.router.conversation import Conversation, Message, ToolCall
from rlagent.router.images import placeholder_of, read_url
from rlagent.router.render import Renderer

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Größe <b> & 'x'", "parameters": {"type": "object"}},
    },
    {
        "type": "function",
        "function": {"name": "go", "parameters": {"type": "object", "properties": {"n": {"type": "number"}}}},
    },
]
CALLING = Message(
    role="assistant",
    content="Let me see.",
    reasoning="hm, ünïcode",
    tool_calls=(
        ToolCall(call_id="a", name="look", arguments='{"key": "ä", "n": [1, 2.5, null]}'),
        ToolCall(call_id="b", name="go", arguments="{}"),
    ),
)
USER = Message(role="user", content="What is 7*6?\n\n  Say it. ")
SYSTEM = Message(role="system", content="Be brief.")
RESULT = Message(role="tool", content='{"x": "<b>"}', tool_call_id="a")
PLAIN = Message(role="assistant", content="42")
THOUGHT = Message(role="assistant", content="42", reasoning="six times seven")
CONVERSATIONS = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, PLAIN, USER],
    "reasoning": [USER, THOUGHT, USER, THOUGHT, USER],
    "tools": [USER, CALLING, RESULT, RESULT],
    "tools, answered": [SYSTEM, USER, CALLING, RESULT, RESULT, PLAIN, USER],
    "ends with an answer": [USER, THOUGHT],
    "client's own answer first": [USER, PLAIN, PLAIN, USER],
}


def reference(family: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    if family != "parcels":
        tokenizer.chat_template = (GOLDEN / f"{family}.jinja").read_text()
    return tokenizer


def as_transformers_takes_it(message: Message) -> dict[str, Any]:
    import json

    body = message.to_json() | {"content": message.content}
    for call in body.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return body


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(
    ("family", "args"),
    [
        ("parcels", {}),
        ("qwen3_like", {}),
        ("qwen3_like", {"enable_thinking": False}),
        ("qwen3_like", {"enable_thinking": True, "show_date": True}),
    ],
    ids=str,
)
def test_text_and_ids_are_those_of_transformers(family: str, args: dict[str, Any], name: str, tools: list[Any]) -> None:
    messages = CONVERSATIONS[name]
    given = [as_transformers_takes_it(message) for message in messages]
    expected = reference(family).apply_chat_template(
        given, tools=tools or None, add_generation_prompt=True, tokenize=False, **args
    )
    ours = renderer(family)
    text, _ = ours.fresh(Conversation(messages=tuple(messages), tools=tuple(tools), template_args=args))
    assert text == expected
    ids = reference(family).apply_chat_template(
        given, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False, **args
    )
    assert ours.tokenizer.encode(text) == ids


def test_a_directory_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    with pytest.raises(LoadError, match=r"no chat template; put the model's template into chat_template\.jinja"):
        Renderer.load(tmp_path)


def test_a_template_in_the_tokenizers_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": "{{ eos_token }}D"}, '
        '{"name": "tool_use", "template": "T"}]}'
    )
    template = ChatTemplate.load(tmp_path)
    assert template.render([], tools=[], args={}) == "</s>D"
    assert template.render([], tools=[{}], args={}) == "T"


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages|nofilter }}"])
def test_a_broken_template_is_a_load_error(source: str) -> None:
    with pytest.raises(LoadError, match="broken"):
        ChatTemplate({"default": source}, {}, "here")


def test_images_stand_where_transformers_puts_them(tmp_path: Path) -> None:
    model = vision_directory(tmp_path / "model")
    image = read_url(uri(png(255)), 2, "messages")
    said = Message(role="user", content="a b <|image_pad|>", images=(image, replace(image, at=17)))
    placeholder = placeholder_of(orjson.loads((model / "config.json").read_bytes()))
    ours = Renderer.load(model, None, placeholder)
    text, _ = ours.fresh(Conversation(messages=(said, PLAIN, USER)))
    ids = ours.tokenizer.encode(text)
    parts = [
        {"type": "text", "text": "a "},
        {"type": "image"},
        {"type": "text", "text": "b <|image_pad|>"},
        {"type": "image"},
    ]
    given = [{"role": "user", "content": parts}, *map(as_transformers_takes_it, (PLAIN, USER))]
    expected = PreTrainedTokenizerFast.from_pretrained(model).apply_chat_template(
        given, add_generation_prompt=True, tokenize=False
    )
    assert ours.tokenizer.unguard(text) == expected
    assert ids.count(placeholder) == 2  # what the agent wrote is text
