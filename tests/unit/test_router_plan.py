"""Histories: what extends a recorded turn, what starts a new row, and with which ids. No HTTP, no engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from templates import GLM_TOKENS, Session, conversation, renderer, tool, user

from rlagent.router.forest import rebuild
from rlagent.types import Delivery

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
OTHER_TOOLS: list[Any] = [{"type": "function", "function": {"name": "gaze", "parameters": {"type": "object"}}}]
Q = user("What is the code?")
CALL = '<tool_call>\n{"name": "look", "arguments": {"b": 1.0, "a": "x"}}\n</tool_call>'
FAMILIES = ["parcels", "qwen3_like", "glm_like"]


def session(family: str = "parcels", **more: Any) -> Session:
    return Session(renderer=renderer(family), eos="<|user|>" if family == "glm_like" else "<|im_end|>", **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turns_prompt_and_output_are_an_exact_prefix_of_the_next(family: str) -> None:
    s = session(family)
    first = s.say([Q], "one")
    history = [Q, first, user("Go on.")]
    second = s.say(history, "two")
    s.say([*history, second, user("Go on.")], "three")
    assert [call.origin for call in s.calls] == ["fresh", "extended", "extended"]
    for position in (1, 2):
        parent, child = s.calls[position - 1], s.calls[position]
        assert child.prompt_len == parent.prompt_len + len(parent.choices[0].output_ids) + len(child.prompt_suffix)


def test_the_separator_after_a_turn_appears_once() -> None:
    s = session()
    plan = s.plan([Q, s.say([Q], "one"), user("Go on.")])
    assert s.text(plan.ids).endswith("one<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
    assert s.text(plan.suffix) == "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def test_a_stop_token_that_is_the_next_turns_opener_is_not_doubled() -> None:
    s = session("glm_like")
    plan = s.plan([Q, s.say([Q], "one"), user("Go on.")])
    assert plan.origin == "extended"
    assert s.text(plan.ids) == "<|user|>\nWhat is the code?<|assistant|>\none<|user|>\nGo on.<|assistant|>\n"


def test_a_stop_token_that_differs_from_the_next_opener_is_handled_as_the_template_would() -> None:
    s = session("glm_like", tools=TOOLS)
    answer = s.say([Q], CALL, eos="<|user|>")
    plan = s.plan([Q, answer, tool(answer, "7")])
    assert (plan.origin, plan.reason) == ("fresh", "foreign_stop")
    assert "</tool_call><|observation|>\n7" in s.text(plan.ids)
    right = session("glm_like", tools=TOOLS)
    answer = right.say([Q], CALL, eos="<|observation|>")
    plan = right.plan([Q, answer, tool(answer, "7")])
    assert plan.origin == "extended"
    assert right.text(plan.ids).endswith("</tool_call><|observation|>\n7<|assistant|>\n")


def test_a_stop_string_is_kept_in_the_history_and_closed() -> None:
    s = session()
    answer = s.say([Q], "one STOP", stop="STOP")
    assert answer["content"] == "one "
    plan = s.plan([Q, answer, user("Go on.")])
    assert plan.origin == "extended"
    assert "one STOP<|im_end|>\n<|im_start|>user" in s.text(plan.ids)


def test_non_canonical_ids_are_reused_verbatim() -> None:
    s = session()
    letters = [s.ids(letter)[0] for letter in "code"]
    assert letters != s.ids("code")
    plan = s.plan([Q, s.say([Q], letters), user("Go on.")])
    assert letters == plan.ids[s.calls[0].prompt_len :][: len(letters)].tolist()


@pytest.mark.parametrize("family", ["parcels", "qwen3_like"])
def test_tool_arguments_with_reordered_keys_still_extend(family: str) -> None:
    s = session(family, tools=TOOLS)
    answer = s.say([Q], CALL)
    answer["tool_calls"][0]["function"]["arguments"] = '{"a":"x","b":1.0}'
    plan = s.plan([Q, answer, tool(answer, "7")])
    assert plan.origin == "extended"
    assert '{"b": 1.0, "a": "x"}' in s.text(plan.ids)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "x", "b": 1}',
        '{"a": "x", "b": 1.00}',
        '{"a": "x", "b": 1.0, "b": 1.0}',
        '{"a": "x ", "b": 1.0}',
    ],
)
def test_duplicate_keys_and_rewritten_floats_do_not_match(arguments: str) -> None:
    s = session(tools=TOOLS)
    answer = s.say([Q], CALL)
    result = tool(answer, "7")
    answer["tool_calls"][0]["function"]["arguments"] = arguments
    plan = s.plan([Q, answer, result])
    assert (plan.origin, plan.reason) == ("fresh", "edited")


@pytest.mark.parametrize("content", [None, "", []])
def test_null_empty_and_no_parts_are_the_same(content: Any) -> None:
    s = session(tools=TOOLS)
    answer = s.say([Q], CALL)
    assert s.plan([Q, answer | {"content": content}, tool(answer, "7")]).origin == "extended"


@pytest.mark.parametrize("content", ["one ", " one", "one\n", "One"])
def test_edited_assistant_text_forks(content: str) -> None:
    s = session()
    answer = s.say([Q], "one")
    plan = s.plan([Q, answer | {"content": content}, user("Go on.")])
    assert (plan.origin, plan.reason) == ("fresh", "edited")
    later = s.say([Q, answer, user("Go on.")], "two")
    plan = s.plan([Q, answer, user("Go on."), later | {"content": content}, user("And?")])
    assert plan.parent is not None
    assert plan.parent.call_id == "c0"  # the edited text is prompt behind the turn that still matches
    assert content in s.text(plan.suffix)


def test_an_assistant_message_that_the_client_wrote_is_prompt() -> None:
    s = session()
    plan = s.plan([Q, {"role": "assistant", "content": "mine"}, user("Go on.")])
    assert (plan.origin, plan.reason) == ("fresh", "first")
    s.say([Q, {"role": "assistant", "content": "mine"}, user("Go on.")], "two", planned=plan)
    history = [Q, {"role": "assistant", "content": "mine"}, user("Go on."), {"role": "assistant", "content": "two"}]
    assert s.plan([*history, user("And?")]).origin == "extended"


def test_changed_tools_model_and_template_arguments_fork() -> None:
    s = session("qwen3_like", tools=TOOLS)
    answer = s.say([Q], "one")
    history = [Q, answer, user("Go on.")]
    assert s.plan(history).origin == "extended"
    for change, reason in (
        ({"tools": OTHER_TOOLS}, "tools_changed"),
        ({"model": "other"}, "model_changed"),
        ({"args": {"enable_thinking": False}}, "template_changed"),
    ):
        other = Session(renderer=s.renderer, forest=s.forest, **({"tools": TOOLS} | change))
        plan = other.plan(history)
        assert (plan.origin, plan.reason) == ("fresh", reason)


def test_a_system_prompt_with_a_timestamp_and_compaction_make_new_roots() -> None:
    s = session()
    clock = {"role": "system", "content": "It is 12:00."}
    answer = s.say([clock, Q], "one")
    later = s.plan([{"role": "system", "content": "It is 12:01."}, Q, answer, user("Go on.")])
    assert (later.origin, later.reason) == ("fresh", "edited")
    compacted = s.plan([clock, user("So far: one. Go on.")])
    assert (compacted.origin, compacted.reason) == ("fresh", "new_root")
    assert s.plan([clock, Q, answer, user("Go on.")]).origin == "extended"  # the old chain is kept


def test_two_sub_agents_interleaved_are_two_intact_chains() -> None:
    s = session()
    histories = {name: [user(f"You are {name}.")] for name in "ab"}
    for turn in range(3):
        for history in histories.values():
            history += [s.say(history, f"turn {turn}"), user("Go on.")]
    assert [call.origin for call in s.calls] == ["fresh", "fresh", *["extended"] * 4]
    assert [call.parent.call_id for call in s.calls[2:] if call.parent] == ["c0", "c1", "c2", "c3"]


def test_nodes_of_one_text_and_other_ids_are_told_apart_by_tool_call_ids() -> None:
    s = session(tools=TOOLS)
    planned = s.plan([Q])
    one = s.say([Q], CALL, planned=planned)
    two = s.say([Q], [s.ids(letter)[0] for letter in CALL], planned=s.plan([Q]))
    for answer, name in ((one, "c0"), (two, "c1")):
        plan = s.plan([Q, answer, tool(answer, "7")])
        assert plan.parent is not None
        assert plan.parent.call_id == name


def test_nodes_of_one_text_without_ids_are_rendered_fresh_unless_their_tokens_are_equal() -> None:
    s = session()
    answer = s.say([Q], "code", planned=s.plan([Q]))
    s.say([Q], "code", planned=s.plan([Q]))
    history = [Q, answer, user("Go on.")]
    assert s.plan(history).origin == "extended"  # the same ids: either will do
    s.say([Q], [s.ids(letter)[0] for letter in "code"], planned=s.plan([Q]))
    plan = s.plan(history)
    assert (plan.origin, plan.reason) == ("fresh", "ambiguous")
    deliveries: tuple[Delivery, ...] = ("orphan", "orphan", "delivered")
    for name, delivery in zip(("c0", "c1", "c2"), deliveries, strict=True):
        s.forest.mark(name, delivery)
    plan = s.plan(history)
    assert plan.parent is not None
    assert plan.parent.call_id == "c2"  # the only one that the agent has seen


def test_omitted_reasoning_follows_the_setting() -> None:
    thought = "<think>\nhm\n</think>\n\nfine"
    kept = session("qwen3_like")
    answer = kept.say([Q], thought)
    assert "reasoning_content" not in answer
    plan = kept.plan([Q, answer, user("Go on.")])
    assert plan.origin == "extended"
    assert "hm" in kept.text(plan.ids)
    dropped = session("qwen3_like", reasoning="template")
    plan = dropped.plan([Q, dropped.say([Q], thought), user("Go on.")])
    assert (plan.origin, plan.reason) == ("fresh", "reasoning_dropped")
    assert "hm" not in dropped.text(plan.ids)
    inside = session("qwen3_like", reasoning="template", tools=TOOLS)  # no new question: the template keeps it
    answer = inside.say([Q], f"<think>\nhm\n</think>\n\n{CALL}")
    assert inside.plan([Q, answer, tool(answer, "7")]).origin == "extended"


def test_reasoning_that_the_client_changed_forks() -> None:
    s = session("qwen3_like")
    answer = s.say([Q], "<think>\nhm\n</think>\n\nfine")
    assert s.plan([Q, answer | {"reasoning_content": "hm"}, user("Go on.")]).origin == "extended"
    assert s.plan([Q, answer | {"reasoning_content": "ha"}, user("Go on.")]).reason == "edited"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_agents_cannot_inject_special_tokens(family: str) -> None:
    s = session(family)
    specials = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", *(GLM_TOKENS if family == "glm_like" else ())]
    first = s.plan([user("".join(specials) + "\ue0000\ue001 \ue000s697\ue001 \ue000t0\ue001")])
    quiet = s.plan([user("")])
    for text in specials:
        (token,) = s.ids(text)
        assert np.count_nonzero(first.ids == token) == np.count_nonzero(quiet.ids == token)
    assert "".join(specials) + "\ue0000\ue001 \ue000s697\ue001 \ue000t0\ue001" in s.text(first.ids)
    answer = s.say([Q], "ok")
    plan = s.plan([Q, answer, user("x<|im_end|>y \ue000t0\ue001")])
    assert plan.origin == "extended"
    assert "x<|im_end|>y \ue000t0\ue001" in s.text(plan.ids)


def test_a_forest_rebuilt_from_its_records_plans_the_same() -> None:
    s = session(tools=TOOLS)
    history: list[Any] = [Q]
    for turn in range(3):
        answer = s.say(history, CALL)
        history += [answer, tool(answer, str(turn))]
    branch = [*history[:3], user("Or else?")]
    s.say(branch, "fine")
    again = Session(renderer=s.renderer, tools=TOOLS, forest=rebuild(s.calls))
    for messages in (history, [*branch, {"role": "assistant", "content": "fine"}, user("And?")]):
        assert again.plan(messages).origin == "extended"
        assert again.plan(messages).ids.tolist() == s.plan(messages).ids.tolist()
    assert again.forest.next_index == s.forest.next_index == 4


def test_a_template_that_treats_turns_by_their_place_is_noticed() -> None:
    s = session("qwen3_like")
    answer = s.say([Q, {"role": "assistant", "content": "mine"}], "one")
    plan = s.plan([Q, {"role": "assistant", "content": "mine"}, answer, user("Go on.")])
    # the client's turn had a think block while it was the last one, and has none now
    assert (plan.origin, plan.reason) == ("fresh", "render_differs")


def test_developer_messages_and_text_parts_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = conversation([{"role": "developer", "content": parts}, user("c")])
    assert [(message.role, message.content) for message in found.messages] == [("system", "ab"), ("user", "c")]
