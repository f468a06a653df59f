"""The messages dialect's request: blocks become messages, and what cannot be honoured is refused by name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rlagent.router.conversation import Message, ToolCall
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.messages import parse
from rlagent.router.errors import ApiError

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def ask(**body: Any) -> Ask:
    return parse(orjson.dumps({"model": "m", "max_tokens": 9, "messages": [USER], **body}), {})


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_what_has_an_effect_is_parsed() -> None:
    found = ask(
        system=[text("a"), {**text("b"), "cache_control": {"type": "ephemeral"}}], stop_sequences=["x"], stream=True,
        temperature=0.5, top_k=3, tools=[TOOL], metadata={"user_id": "u"}, thinking={"type": "enabled", "budget_tokens": 9},
        output_config={"effort": "low"},
    )  # fmt: skip
    assert found.conversation.messages == (Message(role="system", content="ab"), Message(role="user", content="hi"))
    assert found.conversation.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    )
    assert (found.asked.stop, found.asked.max_tokens, found.asked.temperature, found.asked.top_k) == (("x",), 9, 0.5, 3)
    assert (found.stream, found.tools, found.grammar) == (True, True, None)
    assert set(found.ignored) == {"metadata", "thinking", "output_config"}


def test_results_and_text_of_one_message_keep_their_order() -> None:
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "ab"]
    (*_, before, first, second, after) = ask(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"],
            },
            {"role": "user", "content": [text("x"), *results, text("y"), text("z")]},
        ]
    ).conversation.messages
    assert before == Message(role="user", content="x")
    assert (first.role, first.content, first.tool_call_id) == ("tool", "a", "a")
    assert (second.role, second.content, second.tool_call_id) == ("tool", "b", "b")
    assert after == Message(role="user", content="yz")


def test_an_assistants_blocks_are_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, text("I "), text("look"),
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1.0}},
    ]  # fmt: skip
    (_, answer, _) = ask(messages=[USER, {"role": "assistant", "content": blocks}, USER]).conversation.messages
    assert (answer.reasoning, answer.content) == ("hm", "I look")
    assert answer.tool_calls == (ToolCall(call_id="a", name="f", arguments='{"x":1.0}'),)


def test_a_forced_call_and_a_form_are_grammars() -> None:
    forced = ask(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True}).grammar
    assert forced is not None
    assert forced.is_call
    assert orjson.loads(forced.schema)["properties"]["name"] == {"const": "f"}
    two = ask(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice={"type": "any"}).grammar
    assert two is not None
    assert [kind["properties"]["name"]["const"] for kind in orjson.loads(two.schema)["anyOf"]] == ["f", "g"]
    form = ask(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}).grammar
    assert form is not None
    assert (form.is_call, orjson.loads(form.schema)) == (False, {"type": "object"})


def test_tools_that_the_vendor_runs_are_left_out_and_recorded() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    found = ask(tools=[search, TOOL])
    assert [tool["function"]["name"] for tool in found.conversation.tools] == ["f"]
    assert found.ignored == {"tools": [search]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}, USER]}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [TOOL]}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_400_and_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        ask(**body)
    assert (refused.value.status, refused.value.param, refused.value.retry) == (400, param, False)
    assert param in refused.value.message
