"""The responses dialect's request: items become messages, and what cannot be honoured is refused by name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rlagent.router.conversation import Message, ToolCall
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.responses import parse
from rlagent.router.dialects.responses_tools import call_names, namespaces
from rlagent.router.errors import ApiError

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}


def ask(**body: Any) -> Ask:
    return parse(orjson.dumps({"model": "m", "input": "hi", **body}), {})


def test_what_has_an_effect_is_parsed() -> None:
    found = ask(
        instructions="brief", tools=[TOOL], max_output_tokens=9, temperature=0.5, top_p=0.9, stream=True, store=False,
        previous_response_id="resp_1", reasoning={"effort": "low"}, include=["message.output_text.logprobs"],
    )  # fmt: skip
    assert found.conversation.messages == (Message(role="system", content="brief"), Message(role="user", content="hi"))
    assert found.conversation.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    )
    assert (found.asked.max_tokens, found.asked.temperature, found.asked.top_p) == (9, 0.5, 0.9)
    assert (found.previous, found.num_lead, found.stream, found.logprobs) == ("resp_1", 1, True, True)
    assert set(found.ignored) == {"store", "reasoning"}


def test_an_assistants_items_are_one_message_until_another_speaks() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "id": f"fc_{name}", "call_id": name, "name": "f", "arguments": "{}"}

    def output(name: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": name}

    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]}
    reply = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "r"}]}
    asked = [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}]
    items = [*asked, thought, said, call("a"), call("b"), output("a"), output("b"), said, reply]
    calls = tuple(ToolCall(call_id=name, name="f", arguments="{}") for name in "ab")
    assert ask(input=items).conversation.messages == (
        Message(role="system", content="s"),
        Message(role="user", content="q"),
        Message(role="assistant", content="I look", reasoning="hm", tool_calls=calls),
        Message(role="tool", content="a", tool_call_id="a"),
        Message(role="tool", content="b", tool_call_id="b"),
        Message(role="assistant", content="I look"),
        Message(role="user", content="r"),
    )


def test_tools_that_the_vendor_runs_are_left_out_and_recorded() -> None:
    search = {"type": "web_search", "external_web_access": True}
    found = ask(tools=[search, TOOL])
    assert [tool["function"]["name"] for tool in found.conversation.tools] == ["f"]
    assert found.ignored == {"tools": [search]}


def test_functions_of_a_namespace_are_named_with_it_and_come_back_so() -> None:
    space = {"type": "namespace", "name": "team", "tools": [{**TOOL, "name": "ask"}, {"type": "custom", "name": "x"}]}
    call = {"type": "function_call", "call_id": "a", "name": "ask", "namespace": "team", "arguments": "{}"}
    found = ask(tools=[space, TOOL], input=[{"role": "user", "content": "q"}, call])
    assert [tool["function"]["name"] for tool in found.conversation.tools] == ["team.ask", "f"]
    assert found.conversation.messages[-1].tool_calls == (ToolCall(call_id="a", name="team.ask", arguments="{}"),)
    known = namespaces(found.echo["tools"])
    assert call_names(found.conversation.messages[-1].tool_calls[0], known) == {"name": "ask", "namespace": "team"}
    assert call_names(ToolCall(call_id="b", name="other.ask", arguments="{}"), known) == {"name": "other.ask"}


def test_a_forced_call_and_a_form_are_grammars() -> None:
    forced = ask(tools=[TOOL], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False).grammar
    assert forced is not None
    assert forced.is_call
    form = ask(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}).grammar
    assert form is not None
    assert orjson.loads(form.schema) == {"type": "object"}
    assert ask(text={"format": {"type": "text"}, "verbosity": "low"}).grammar is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [IMAGE]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "local_shell"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "function", "name": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_400_and_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        ask(**body)
    assert (refused.value.status, refused.value.param, refused.value.retry) == (400, param, False)
    assert param in refused.value.message
