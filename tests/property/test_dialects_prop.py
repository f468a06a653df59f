"""The same conversation told in each dialect is the same prompt, id for id; and so is what is matched by history."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import renderer

from rlagent.router.conversation import Conversation, history_digests
from rlagent.router.dialects import chat, messages, responses

_text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
_arguments = st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9) | st.booleans() | _text, max_size=2)
_schema = {"type": "object", "properties": {"a": {"type": "string"}}}


@dataclass(frozen=True)
class Turn:
    """A user's text, then what the assistant thought, said and called, and the results of its calls."""

    user: str
    thought: str
    said: str
    calls: tuple[dict[str, Any], ...]
    results: tuple[str, ...]


@st.composite
def _turns(draw: st.DrawFn) -> Turn:
    calls = tuple(draw(st.lists(_arguments, max_size=2)))
    results = tuple(draw(_text) for _ in calls)
    return Turn(draw(_text), draw(st.just("") | _text), draw(_text), calls, results)


@dataclass(frozen=True)
class Story:
    """A conversation without a wire format. `last` is the user's last text."""

    system: str
    tools: bool
    turns: tuple[Turn, ...]
    last: str


_stories = st.builds(Story, st.just("") | _text, st.booleans(), st.lists(_turns(), max_size=3).map(tuple), _text)


def in_chat(story: Story) -> Conversation:
    sent: list[Any] = [{"role": "system", "content": story.system}] if story.system else []
    for number, turn in enumerate(story.turns):
        calls = [
            {"id": f"c{number}{at}", "type": "function", "function": {"name": "f", "arguments": json.dumps(given)}}
            for at, given in enumerate(turn.calls)
        ]
        answer = {"role": "assistant", "content": turn.said, "reasoning_content": turn.thought, "tool_calls": calls}
        sent += [{"role": "user", "content": turn.user}, answer]
        sent += [
            {"role": "tool", "tool_call_id": f"c{number}{at}", "content": text} for at, text in enumerate(turn.results)
        ]
    body: dict[str, Any] = {"model": "m", "messages": [*sent, {"role": "user", "content": story.last}]}
    if story.tools:
        tool = {"name": "f", "description": "d", "parameters": _schema}
        body["tools"] = [{"type": "function", "function": tool}]
    return chat.parse(orjson.dumps(body), {}).conversation


def in_responses(story: Story) -> Conversation:
    sent: list[Any] = []
    for number, turn in enumerate(story.turns):
        sent.append({"role": "user", "content": [{"type": "input_text", "text": turn.user}]})
        if turn.thought:
            thought = [{"type": "reasoning_text", "text": turn.thought}]
            sent.append({"type": "reasoning", "id": "r", "summary": [], "content": thought})
        sent.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": turn.said}]})
        sent += [
            {"type": "function_call", "call_id": f"c{number}{at}", "name": "f", "arguments": json.dumps(given)}
            for at, given in enumerate(turn.calls)
        ]
        sent += [
            {"type": "function_call_output", "call_id": f"c{number}{at}", "output": text}
            for at, text in enumerate(turn.results)
        ]
    body: dict[str, Any] = {"model": "m", "input": [*sent, {"role": "user", "content": story.last}]}
    if story.system:
        body["instructions"] = story.system
    if story.tools:
        body["tools"] = [{"type": "function", "name": "f", "description": "d", "parameters": _schema, "strict": True}]
    return responses.parse(orjson.dumps(body), {}).conversation


def in_messages(story: Story) -> Conversation:
    sent: list[Any] = []
    results: list[Any] = []
    for number, turn in enumerate(story.turns):
        sent.append({"role": "user", "content": [*results, {"type": "text", "text": turn.user}]})
        blocks: list[Any] = []
        if turn.thought:
            blocks.append({"type": "thinking", "thinking": turn.thought, "signature": "s"})
        blocks.append({"type": "text", "text": turn.said})
        blocks += [
            {"type": "tool_use", "id": f"c{number}{at}", "name": "f", "input": given}
            for at, given in enumerate(turn.calls)
        ]
        sent.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": f"c{number}{at}", "content": text}
            for at, text in enumerate(turn.results)
        ]
    sent.append({"role": "user", "content": [*results, {"type": "text", "text": story.last}]})
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": sent, "system": story.system}
    if story.tools:
        body["tools"] = [{"name": "f", "description": "d", "input_schema": _schema}]
    return messages.parse(orjson.dumps(body), {}).conversation


@pytest.mark.parametrize("family", ["parcels", "qwen3_like"])
def test_the_same_conversation_in_each_dialect_is_the_same_prompt(family: str) -> None:
    made = renderer(family)

    @settings(max_examples=60, deadline=None)
    @given(_stories)
    def check(story: Story) -> None:
        told = [in_chat(story), in_responses(story), in_messages(story)]
        prompts = [made.tokenizer.encode(made.fresh(conversation)[0]) for conversation in told]
        assert prompts[0] == prompts[1] == prompts[2]
        histories = [history_digests(conversation.messages) for conversation in told]
        assert histories[0] == histories[1] == histories[2]

    check()
