"""Reading what a model wrote: reasoning, text, tool calls; what is malformed stays text."""

from __future__ import annotations

import itertools

import pytest

from rlagent.router.conversation import Message
from rlagent.router.parse import OutputParser, trim_stop
from rlagent.router.tool_calls import parse_tool_call

LOOK = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'


def read(text: str, *, tools: bool = True, thinking: bool = False) -> tuple[Message, str]:
    numbers = itertools.count()
    parser = OutputParser(tools=tools, thinking=thinking, mint=lambda: f"call_{next(numbers)}")
    parser.feed(text)
    parser.finish()
    return parser.message, parser.status


def test_text_is_kept_to_the_character() -> None:
    message, status = read("  one\n two \n")
    assert (message.content, status) == ("  one\n two \n", "text")


def test_a_tool_call_keeps_its_arguments_as_written() -> None:
    message, status = read('<tool_call>{"name": "f", "arguments": {"x": 1.50,  "x": "\\u00e4"}}</tool_call>')
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"x": 1.50,  "x": "\\u00e4"}')]
    assert (message.content, status) == ("", "tool_calls")


def test_several_calls_keep_their_order_and_get_ids_of_their_own() -> None:
    message, _ = read(f"See:\n\n{LOOK}\n{LOOK.replace('look', 'go')}\n")
    assert [(call.call_id, call.name) for call in message.tool_calls] == [("call_0", "look"), ("call_1", "go")]
    assert message.content == "See:"


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "f", "arguments": {"x"\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "x"}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "name": "g", "arguments": {}}\n</tool_call>',
        "<tool_call>\nf(x)\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}',
    ],
)
def test_a_malformed_call_is_served_as_the_text_it_is(broken: str) -> None:
    message, status = read(f"See:\n{broken}\n")
    assert (message.content, message.tool_calls, status) == (f"See:\n{broken}\n", (), "malformed")


def test_a_malformed_call_beside_a_good_one_is_flagged() -> None:
    message, status = read(f"{LOOK}\n<tool_call>x</tool_call> end")
    assert (message.content, len(message.tool_calls), status) == ("<tool_call>x</tool_call> end", 1, "malformed")


def test_calls_are_text_where_no_tools_were_given() -> None:
    message, status = read(LOOK, tools=False)
    assert (message.content, status) == (LOOK, "text")


def test_reasoning_is_told_from_the_answer() -> None:
    message, _ = read(f"\n<think>\nhm\n hm\n</think>\n\nSee.\n{LOOK}")
    assert (message.reasoning, message.content, len(message.tool_calls)) == ("hm\n hm", "See.", 1)


def test_reasoning_that_the_prompt_opened_or_that_never_ends() -> None:
    assert read("hm</think>fine", thinking=True)[0] == Message(role="assistant", content="fine", reasoning="hm")
    assert read("<think>hm, <tool_call>")[0] == Message(role="assistant", reasoning="hm, <tool_call>")
    assert read("fine <think>hm</think>")[0].content == "fine <think>hm</think>"
    assert read("<thi")[0].content == "<thi"


def test_names_and_arguments_of_a_call() -> None:
    assert parse_tool_call(' {"name": "f", "parameters": {"a": [1, {}]}} ') == ("f", '{"a": [1, {}]}', "")
    assert parse_tool_call('{"name": "f"}') == ("f", "{}", "")
    assert parse_tool_call('{"name": "f"} x') is None
    assert parse_tool_call('{"name": "f",}') is None
    assert parse_tool_call("") is None


def test_text_ends_at_the_first_stop_string() -> None:
    assert trim_stop("a END b STOP", ["STOP", "END"]) == "a "
    assert trim_stop("a", ["STOP"]) == "a"
