"""Whatever JSON an agent sends, a dialect parses it or refuses it by name: no failure of our making."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.router.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from rlagent.router.dialects.ask import Ask
from rlagent.router.errors import ApiError

Parse = Callable[[bytes, Mapping[str, str]], Ask]
_json: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**40)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "x", "text"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "text", "x"]), inner, max_size=2)
    ),
    max_leaves=5,
)
_SCHEMA: Final = {"type": "object"}
_FUNCTION: Final = {"name": "f", "description": "d", "parameters": _SCHEMA}
_CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: Final[dict[str, tuple[Parse, dict[str, Any]]]] = {
    "chat": (
        CHAT.parse,
        {
            "model": "m", "tools": [{"type": "function", "function": _FUNCTION}], "stop": ["x"], "n": 1, "logprobs": True,
            "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream_options": {"include_usage": True},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
            "chat_template_kwargs": {"x": 1},
            "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]},
                         {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                         {"role": "tool", "tool_call_id": "c", "content": "r"}],
        },
    ),
    "completions": (
        COMPLETIONS.parse,
        {"model": "m", "prompt": [[1, 2]], "stop": "x", "logprobs": 1, "best_of": 1, "stream_options": {},
         "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}},
    ),
    "responses": (
        RESPONSES.parse,
        {
            "model": "m", "instructions": "s", "tools": [{"type": "function", **_FUNCTION}], "include": ["x"],
            "tool_choice": {"type": "function", "name": "f"}, "metadata": {}, "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}},
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                      {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                      {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                      {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]}],
        },
    ),
    "messages": (
        MESSAGES.parse,
        {
            "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
            "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}, "effort": "low"},
            "messages": [{"role": "user", "content": "q"},
                         {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                                           {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
                                                       "content": [{"type": "text", "text": "r"}]}]}],
        },
    ),
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in members:
        yield (*path, name)
        yield from places(inner, (*path, name))


def outcome(parse: Parse, content: bytes) -> int:
    """The status of a body that goes no further than its dialect."""
    try:
        parse(content, {})
    except ApiError as refused:
        return refused.status
    return 200


@pytest.mark.parametrize("dialect", BODIES)
def test_any_body_is_parsed_or_refused(dialect: str) -> None:
    parse, body = BODIES[dialect]
    assert isinstance(parse(orjson.dumps(body), {}), Ask)
    everywhere = list(places(body))

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from(everywhere), _json, st.booleans())
    def check(path: tuple[Any, ...], value: Any, unforced: bool) -> None:
        changed = copy.deepcopy(body)
        if unforced:  # so that the form is looked at
            changed.pop("tool_choice", None)
        target: Any = changed
        for name in path[:-1]:
            target = target.get(name, {}) if isinstance(target, dict) else target[name]
        target[path[-1]] = value
        assert outcome(parse, orjson.dumps(changed)) in (200, 400)

    check()
