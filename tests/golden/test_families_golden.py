"""Templates of other families: our text is transformers' text, given the messages in the form that the template takes."""

from __future__ import annotations

from typing import Any

import pytest
from templates import FAMILY_TOKENS, GOLDEN, MODEL, eos_of, renderer
from transformers import PreTrainedTokenizerFast

from rlagent.router.chat_template import TemplateError
from rlagent.router.conversation import Conversation, Message, ToolCall

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = ToolCall(call_id="a1b2c3d4e", name="look", arguments='{"key": "ä", "n": [1, 2.5, null]}')
USER = Message(role="user", content="What is 7*6?\n\n  Say it. ")
CALLING = Message(role="assistant", tool_calls=(CALL,))
THINKING = Message(role="assistant", reasoning="hm, ünïcode", tool_calls=(CALL,))
RESULT = Message(role="tool", content='{"x": "<b>"}', tool_call_id="a1b2c3d4e")
PLAIN = Message(role="assistant", content="42")
CONVERSATIONS = {
    "question": [USER],
    "system and turns": [Message(role="system", content="Be brief."), USER, PLAIN, USER],
    "a call": [USER, CALLING, RESULT],
    "a call with reasoning, answered": [USER, THINKING, RESULT, PLAIN, USER],
}
FAMILIES = ["llama3_like", "mistral_like", "deepseek_like", "harmony_like"]


def reference(family: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(FAMILY_TOKENS[family])})
    tokenizer.eos_token = eos_of(family)
    tokenizer.chat_template = (GOLDEN / f"{family}.jinja").read_text()
    return tokenizer


def as_the_family_takes_it(family: str, message: Message) -> dict[str, Any]:
    import json

    body = message.to_json() | {"content": message.content}
    if family == "deepseek_like" and message.tool_calls:
        body["content"] = None
    for call in body.get("tool_calls", ()):
        if family != "deepseek_like":
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if family == "harmony_like" and message.reasoning:
        body["thinking"] = message.reasoning
    return body


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_text_and_ids_are_those_of_transformers(family: str, name: str, tools: list[Any]) -> None:
    messages = CONVERSATIONS[name]
    tokenizer = reference(family)
    given = [as_the_family_takes_it(family, message) for message in messages]
    expected = tokenizer.apply_chat_template(given, tools=tools or None, add_generation_prompt=True, tokenize=False)
    ours = renderer(family)
    text, _ = ours.fresh(Conversation(messages=tuple(messages), tools=tuple(tools)))
    assert text == expected
    assert ours.tokenizer.encode(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("family", "detected", "text_arguments", "null_content", "short_ids", "reasoning_key"),
    [
        ("qwen3_like", "hermes", False, False, False, "reasoning_content"),
        ("glm_like", "hermes", False, False, False, "reasoning_content"),
        ("llama3_like", "llama3", False, False, False, "reasoning_content"),
        ("mistral_like", "mistral", False, False, True, "reasoning_content"),
        ("deepseek_like", "deepseek", True, True, False, "reasoning_content"),
        ("harmony_like", "harmony", False, False, False, "thinking"),
    ],
)
def test_a_template_tells_its_family_and_the_form_of_its_messages(
    family: str, detected: str, text_arguments: bool, null_content: bool, short_ids: bool, reasoning_key: str
) -> None:
    found = renderer(family)
    form = found.message_form
    assert (found.output_form.name, found.family_known) == (detected, True)
    assert (form.arguments_as_text, form.null_content, form.short_ids) == (text_arguments, null_content, short_ids)
    assert form.reasoning_key == reasoning_key


def test_long_call_ids_become_nine_characters_for_a_template_that_wants_them() -> None:
    call = ToolCall(call_id="call_0123456789abcdef", name="look", arguments="{}")
    said = (USER, Message(role="assistant", tool_calls=(call,)), Message(role="tool", tool_call_id=call.call_id))
    text, _ = renderer("mistral_like").fresh(Conversation(messages=said))
    shown = text.partition('"id": "')[2].partition('"')[0]
    assert len(shown) == 9
    assert f'"call_id": "{shown}"' in text


def test_a_strict_template_refuses_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match="user and assistant must alternate"):
        renderer("mistral_like").fresh(Conversation(messages=(USER, USER)))
