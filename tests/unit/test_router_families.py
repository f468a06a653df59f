"""What each family writes for a tool call is read; what is not quite that is text, and flagged."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from family_outputs import CALLS, MALFORMED, TOOLS, parser_of
from templates import MODEL, Session, renderer, tokenizer, tool, user

from rlagent.router.chat_template import ChatTemplate
from rlagent.router.conversation import Message
from rlagent.router.families import FORMS, detect
from rlagent.router.render import Renderer


def read(family: str, text: str, *, tools: bool = True) -> tuple[Message, str]:
    parser = parser_of(family, itertools.count(), tools=tools)
    parser.feed(text)
    parser.finish()
    return parser.message, parser.status


@pytest.mark.parametrize(("family", "text", "content", "calls"), CALLS)
def test_a_family_s_tool_calls_are_read(family: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    message, status = read(family, text)
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert (message.content, status) == (content, "tool_calls")


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_a_family_s_malformed_call_is_served_as_text_and_flagged(family: str, text: str) -> None:
    message, status = read(family, text)
    assert (message.content, message.tool_calls, status) == (text, (), "malformed")


@pytest.mark.parametrize("answer", ['{"name": "Ada", "age": 36}', '{"answer": 42}', "{", " {}"])
def test_an_answer_that_is_json_is_no_call(answer: str) -> None:
    message, status = read("llama3", answer)
    assert (message.content, status) == (answer, "text")


def test_calls_are_text_where_no_tools_were_given() -> None:
    for family, text, _, _ in CALLS:
        if family != "harmony":
            assert read(family, text, tools=False)[0].content == text


def test_glm_values_are_typed_by_the_tool_s_schema() -> None:
    text = "<tool_call>f<arg_key>s</arg_key><arg_value>3</arg_value><arg_key>n</arg_key><arg_value>3</arg_value></tool_call>"
    assert read("glm", text)[0].tool_calls[0].arguments == '{"s": "3", "n": 3}'


def test_harmony_channels_are_reasoning_and_answer() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42"
    assert read("harmony", text)[0] == Message(role="assistant", content="42", reasoning="hm")
    assert read("harmony", "no channels")[0].content == "no channels"


def test_reasoning_of_mistral_stands_between_its_own_marks() -> None:
    assert read("mistral", "[THINK]hm[/THINK]42")[0] == Message(role="assistant", content="42", reasoning="hm")


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("<|im_start|>", "hermes"), ("<tool_call><function=x><parameter=y>", "text"), ("<arg_key><tool_call>", "glm"),
        ("<|start_header_id|>", "llama3"), ("[INST]", "mistral"), ("<｜Assistant｜>", "deepseek"),
        ("<|channel|><|message|>", "harmony"),
    ],
)  # fmt: skip
def test_the_family_is_told_by_the_template_s_marks(source: str, family: str) -> None:
    assert detect(source) is FORMS[family]  # type: ignore[index]


def test_an_unknown_family_is_text_unless_the_setting_names_one() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, "x")
    unknown = Renderer(template, tokenizer())
    assert (unknown.output_form.name, unknown.family_known) == ("text", False)
    named = Renderer(template, tokenizer(), "llama3")
    assert (named.output_form.name, named.family_known) == ("llama3", True)
    assert Renderer.load(MODEL, "glm").output_form.name == "glm"


@pytest.mark.parametrize(("family", "eos"), [("llama3_like", "<|eot_id|>"), ("deepseek_like", "<｜end▁of▁sentence｜>")])
def test_a_plain_turn_of_a_family_is_extended(family: str, eos: str) -> None:
    s = Session(renderer=renderer(family), eos=eos)
    first = [user("hi")]
    answer = s.say(first, "there")
    found = s.plan([*first, answer, user("again")])
    assert found.origin == "extended"
    full = s.renderer.fresh(s_conversation([*first, answer, user("again")]))[0]
    assert s.text(found.ids) == full


def test_a_tool_turn_of_llama_is_extended() -> None:
    s = Session(renderer=renderer("llama3_like"), eos="<|eot_id|>", tools=TOOLS)
    first = [user("hi")]
    answer = s.say(first, '{"name": "f", "parameters": {"s": "x"}}')
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"s": "x"}'}
    assert s.plan([*first, answer, tool(answer, "done")]).origin == "extended"


def s_conversation(messages: list[Any]) -> Any:
    from templates import conversation

    return conversation(messages)


def test_a_template_that_cannot_be_extended_gives_a_full_render() -> None:
    s = Session(renderer=renderer("mistral_like"), eos="</s>", tools=TOOLS)
    first = [user("hi")]
    answer = s.say(first, '[TOOL_CALLS][{"name": "f", "arguments": {"s": "x"}}]')
    found = s.plan([*first, answer, tool(answer, "done")])
    assert (found.origin, found.reason) in [("fresh", "render_differs"), ("fresh", "template_refused")]
    assert '"call_id"' in s.text(found.ids)
