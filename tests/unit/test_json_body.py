"""Bodies and arguments nested too deep are refused where they come in, so that nothing behind has to walk them."""

from __future__ import annotations

import orjson
import pytest

from rlagent.router.conversation import Message, ToolCall
from rlagent.router.dialects.messages_answer import _strict
from rlagent.router.errors import ApiError
from rlagent.router.json_body import MAX_ARGUMENTS_DEPTH, MAX_DEPTH, load_json, text_too_deep
from rlagent.router.message_form import MessageForm
from rlagent.router.tool_calls import llama_calls, mistral_calls, object_call, one_json


def nested(depth: int) -> str:
    """An object within objects."""
    return '{"a":' * depth + "1" + "}" * depth


def test_a_body_may_be_nested_so_deep_and_no_deeper() -> None:
    assert isinstance(load_json(nested(MAX_DEPTH).encode()), dict)
    for depth in (MAX_DEPTH + 1, 300, 1000, 5000):
        for form in (nested(depth), "[" * depth + "]" * depth):
            with pytest.raises(ApiError, match=r"nested deeper|not valid JSON"):
                load_json(form.encode(), constants=True)


def test_brackets_in_text_are_no_nesting() -> None:
    assert not text_too_deep(orjson.dumps({"a": "[{" * 500 + '\\"' + "[" * 500}).decode())
    assert not text_too_deep("[" + "[]," * 500 + "[]]")
    assert text_too_deep(nested(MAX_ARGUMENTS_DEPTH + 1))


@pytest.mark.parametrize("depth", [MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_DEPTH + 1, 990, 5000])
def test_a_sampled_call_that_could_not_come_back_is_no_call(depth: int) -> None:
    deep = nested(depth)
    call = f'{{"name": "f", "arguments": {deep}}}'
    found = (one_json(call, ()), llama_calls(call, ()), mistral_calls(f"[{call}]", ()), object_call("f", deep))
    assert [bool(one) for one in found] == [depth <= MAX_ARGUMENTS_DEPTH] * 4


def test_arguments_of_an_agent_nested_too_deep_stay_text() -> None:
    deep = nested(1000)
    message = Message(role="assistant", tool_calls=(ToolCall(call_id="c", name="f", arguments=deep),))
    (call,) = MessageForm().plain(message, lambda value: value)["tool_calls"]
    assert call["function"]["arguments"] == deep


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": -Infinity}'])
def test_what_only_python_takes_for_json_goes_out_as_json(arguments: str) -> None:
    assert set(orjson.loads(_strict(arguments))) == {"a"}
