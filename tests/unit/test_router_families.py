"""What each family writes for a tool call is read; what is not quite that is text, and flagged."""

from __future__ import annotations

import itertools

import pytest
from family_outputs import CALLS, MALFORMED, TOOLS, parser_of
from templates import FAMILY_TOKENS, GOLDEN, MODEL, Session, conversation, renderer, tokenizer, tool, user

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
    full = s.renderer.fresh(conversation([*first, answer, user("again")]))[0]
    assert s.text(found.ids) == full


def test_a_tool_turn_of_llama_is_extended() -> None:
    s = Session(renderer=renderer("llama3_like"), eos="<|eot_id|>", tools=TOOLS)
    first = [user("hi")]
    answer = s.say(first, '{"name": "f", "parameters": {"s": "x"}}')
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"s": "x"}'}
    assert s.plan([*first, answer, tool(answer, "done")]).origin == "extended"


MISTRAL_CALL = '[TOOL_CALLS][{"name": "f", "arguments": {"s": "x"}, "id": "aB3dE6gH9"}]'
HARMONY_CALL = (
    '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{"s": "x"}'
)
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format(
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "x"}\n```<｜tool▁call▁end｜>'
)


@pytest.mark.parametrize(
    ("family", "eos", "written", "behind"),
    [
        ("mistral_like", "</s>", MISTRAL_CALL, '</s>[TOOL_RESULTS]{"content": "done", "call_id": "aB3dE6gH9"}[/TOOL_RESULTS]'),
        ("harmony_like", "<|call|>", HARMONY_CALL,
         '<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>"done"<|end|><|start|>assistant'),
        ("deepseek_like", "<｜end▁of▁sentence｜>", DEEPSEEK_CALL,
         "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>done<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
    ],
)  # fmt: skip
def test_a_tool_loop_goes_on_from_what_was_sampled(family: str, eos: str, written: str, behind: str) -> None:
    """Token for token, also where the template would write the calls otherwise (spaces, ids, channels)."""
    s = Session(renderer=renderer(family), eos=eos, tools=TOOLS)
    history = [user("hi")]
    text = s.text(s.plan(history).ids)
    for _ in range(3):
        answer = s.say(history, written)
        assert [call["function"] for call in answer["tool_calls"]] == [{"name": "f", "arguments": '{"s": "x"}'}]
        history += [answer, tool(answer, "done")]
        found = s.plan(history)
        assert (found.origin, found.reason) == ("extended", "")
        text += written + behind
        assert s.text(found.ids) == text


def test_a_return_stands_for_the_end_of_a_message_where_reasoning_is_kept() -> None:
    written = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>there"
    for reasoning, origin in (("all", "extended"), ("template", "fresh")):
        s = Session(renderer=renderer("harmony_like"), eos="<|return|>", reasoning=reasoning)  # type: ignore[arg-type]
        history = [user("hi")]
        asked = s.text(s.plan(history).ids)
        answer = s.say(history, written)
        found = s.plan([*history, answer, user("again")])
        assert found.origin == origin
        if origin == "extended":
            behind = "<|return|><|start|>user<|message|>again<|end|><|start|>assistant"
            assert s.text(found.ids) == asked + written + behind


def test_a_question_behind_a_tool_loop_of_mistral_moves_the_tools_and_is_rendered_afresh() -> None:
    s = Session(renderer=renderer("mistral_like"), eos="</s>", tools=TOOLS)
    history = [user("hi")]
    answer = s.say(history, MISTRAL_CALL)
    history += [answer, tool(answer, "done")]
    history += [s.say(history, "there"), user("again")]
    found = s.plan(history)
    assert (found.origin, found.reason) == ("fresh", "render_differs")
    assert s.text(found.ids).count("[AVAILABLE_TOOLS]") == 1


def test_a_turn_that_the_template_does_not_close_is_rendered_afresh() -> None:
    """DeepSeek V3's first template ends a turn of two calls, and none of one: the next stop token is another turn's."""
    source = (GOLDEN / "deepseek_like.jinja").read_text()
    open_one = source.replace("{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}", (
        "{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' if message.tool_calls | length > 1 else '' }}"
    ))  # fmt: skip
    assert open_one != source
    s = Session(
        renderer=Renderer(ChatTemplate({"default": open_one}, {}, "x"), tokenizer(*FAMILY_TOKENS["deepseek_like"])),
        eos="<｜end▁of▁sentence｜>",
        tools=TOOLS,
    )
    history = [user("hi")]
    answer = s.say(history, DEEPSEEK_CALL)
    history += [answer, tool(answer, "done")]
    later = [*history, {"role": "assistant", "content": "mine"}, user("again")]
    for asked in (history, later):
        found = s.plan(asked)
        assert (found.origin, found.reason) == ("fresh", "render_differs")
        assert "done" in s.text(found.ids)
