"""The chat dialect's request: what is parsed, what is refused and why. And whose sampling wins."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rlagent.errors import ConfigError
from rlagent.router.config import SamplingConfig
from rlagent.router.conversation import ToolCall
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.chat import parse
from rlagent.router.errors import ApiError
from rlagent.router.sampling import Asked, check_session_sampling, decide

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def ask(**body: Any) -> Ask:
    return parse(orjson.dumps({"model": "m", "messages": [USER], **body}), {})


def test_what_has_an_effect_is_parsed() -> None:
    found = parse(
        orjson.dumps(
            {
                "model": "m", "messages": [USER], "tools": [TOOL], "tool_choice": "auto", "n": 2, "stream": True,
                "stream_options": {"include_usage": True}, "stop": ["a", "b"], "max_tokens": 9,
                "max_completion_tokens": 7, "temperature": 1, "logprobs": True, "chat_template_kwargs": {"x": 1},
                "store": False, "metadata": {"a": "b"}, "user": None, "parallel_tool_calls": True,
                "response_format": {"type": "text"},
            }
        ),
        {"x-stainless-retry-count": "2"},
    )  # fmt: skip
    assert (found.n, found.stream, found.include_usage, found.tools, found.logprobs) == (2, True, True, True, True)
    assert (found.asked.stop, found.asked.max_tokens, found.asked.temperature) == (("a", "b"), 7, 1.0)
    assert found.conversation.template_args == {"x": 1}
    assert found.ignored == {"store": False, "metadata": {"a": "b"}}
    assert found.retry_count == 2


def test_tool_choice_none_reads_no_calls_and_keeps_the_tools_in_the_prompt() -> None:
    found = ask(tools=[TOOL], tool_choice="none")
    assert (found.tools, found.conversation.tools) == (False, (TOOL,))


def test_an_assistants_message_as_the_sdk_sends_it_back() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    sent = {"role": "assistant", "content": None, "refusal": None, "annotations": None, "tool_calls": [call]}
    found = ask(messages=[USER, sent, {"role": "tool", "tool_call_id": "a", "content": "7"}])
    _, answer, result = found.conversation.messages
    assert answer.tool_calls == (ToolCall(call_id="a", name="f", arguments='{"x": 1}'),)
    assert (result.tool_call_id, result.content) == ("a", "7")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}]}, "messages"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_400_and_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        ask(**body)
    assert (refused.value.status, refused.value.param, refused.value.retry) == (400, param, False)
    assert param in refused.value.message


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_what_is_no_json_object_is_400(content: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse(content, {})
    assert refused.value.status == 400


RUN = SamplingConfig(temperature=0.8, max_tokens=100)


def test_the_runs_sampling_wins_where_it_is_trained_on() -> None:
    asked = Asked(temperature=0.8, top_p=0.9, seed=1, max_tokens=500, stop=("x",), other={"min_p": 0.1})
    found = decide(asked, RUN, {}, trained=True)
    assert found.overridden == ("top_p", "seed", "max_tokens", "min_p")
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.seed) == (0.8, 1.0, None)
    assert (found.sampling.max_tokens, found.sampling.stop) == (100, ("x",))
    assert found.exact


def test_the_clients_wishes_win_elsewhere_and_a_sessions_settings_over_both() -> None:
    asked = Asked(temperature=0.2, top_p=0.9, top_k=5, seed=7, max_tokens=50)
    found = decide(asked, RUN, {"temperature": 0.0}, trained=False)
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.top_k) == (0.0, 0.9, 5)
    assert (found.sampling.seed, found.sampling.max_tokens) == (7, 50)
    assert found.overridden == ("temperature",)
    assert not found.exact
    with pytest.raises(ApiError, match="min_p"):
        decide(Asked(other={"min_p": 0.1}), RUN, {}, trained=False)
    assert decide(Asked(other={"min_p": 0.0, "repetition_penalty": 1.0}), RUN, {}, trained=False).overridden == ()


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(top_p=0.9), SamplingConfig(top_k=5), SamplingConfig(temperature=0)]
)
def test_a_cut_or_greedy_distribution_is_not_exact(sampling: SamplingConfig) -> None:
    assert not decide(Asked(), sampling, {}, trained=True).exact


@pytest.mark.parametrize("given", [{"heat": 1}, {"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}])
def test_a_sessions_sampling_is_checked_when_it_is_opened(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        check_session_sampling(given)
