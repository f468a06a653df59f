"""When two messages say the same."""

from __future__ import annotations

import pytest

from rlagent.router.conversation import (
    Conversation,
    Message,
    ToolCall,
    canonical_arguments,
    history_digests,
    match_key,
    root_of,
)


def calling(arguments: str, call_id: str = "a") -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(call_id=call_id, name="f", arguments=arguments),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [1, {"c": 2, "d": 3}]}', '{"b":[1,{"d":3,"c":2}],"a":1}'),
        ('{"a": "\\u00e4"}', '{"a": "ä"}'),
        ("not json", "not json"),
        ('{"a": 1, "a": 1}', '{"a": 1, "a": 1}'),
    ],
)
def test_key_order_and_json_whitespace_do_not_matter(one: str, other: str) -> None:
    assert match_key(calling(one)) == match_key(calling(other, "another id"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1.0}', '{"a": 1}'),
        ('{"a": 1e3}', '{"a": 1000.0}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": "#1"}', '{"a": 1}'),
        ('{"a": 1}', '{"a": 1, "a": 1}'),
        ('{"a": "x "}', '{"a": "x"}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ("{}", ""),
        ('{"a": null}', "{}"),
        ('{"a": true}', '{"a": "true"}'),
    ],
)
def test_what_is_not_the_same(one: str, other: str) -> None:
    assert match_key(calling(one)) != match_key(calling(other))


def test_numbers_keep_their_spelling() -> None:
    assert canonical_arguments('{"b": 1.0, "a": -2e5}') == '{"a":-2e5,"b":1.0}'


def test_whitespace_of_content_matters_and_reasoning_is_left_to_the_forest() -> None:
    one = Message(role="assistant", content="a")
    assert match_key(one) != match_key(Message(role="assistant", content="a "))
    assert match_key(one) == match_key(Message(role="assistant", content="a", reasoning="hm"))
    assert match_key(one) != match_key(Message(role="user", content="a"))


def test_a_message_comes_back_from_its_record() -> None:
    message = Message(
        role="assistant", content="x", reasoning="hm", name="n",
        tool_calls=(ToolCall(call_id="a", name="f", arguments="{}"),),
    )  # fmt: skip
    assert Message.from_json(message.to_json()) == message
    result = Message(role="tool", tool_call_id="a")
    assert Message.from_json(result.to_json()) == result


def test_histories_are_told_apart_by_every_earlier_message() -> None:
    a, b = Message(role="user", content="a"), Message(role="user", content="b")
    assert history_digests([a, b])[1] != history_digests([b, b])[1]
    assert history_digests([a, b])[1] == history_digests([b], after=history_digests([a])[0])[0]


def test_a_roots_change_is_named() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    plain = Conversation(messages=())
    root = root_of("m", plain, "r")
    assert root.change(root_of("m", Conversation(messages=(), tools=tools), "r")) == "tools_changed"
    assert root.change(root_of("m", Conversation(messages=(), template_args={"a": 1}), "r")) == "template_changed"
    assert root.change(root_of("m", plain, "another template")) == "template_changed"
    assert root.change(root_of("n", plain, "r")) == "model_changed"
    assert root.change(root_of("m", plain, "r")) == ""
