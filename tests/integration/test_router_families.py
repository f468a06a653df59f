"""A served model of another family: its calls are tool calls for the agent; what cannot be extended is said once and counted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fake_engine import Reply
from router_harness import EOS, TOOLS, USER, always, in_turn, router, said

from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.router.families import FamilyName

LOOK = {
    "llama3": '{"name": "look", "parameters": {"key": "a"}}',
    "glm": "<tool_call>look\n<arg_key>key</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"key": "a"}}]',
    "harmony": '<|channel|>commentary to=functions.look<|message|>{"key": "a"}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", sorted(LOOK))
async def test_the_family_setting_chooses_the_parser(tmp_path: Path, family: FamilyName, stream: bool) -> None:
    script = always(said(LOOK[family]))
    config, sampling = RouterConfig(family=family), SamplingConfig(max_tokens=200)
    async with router(tmp_path, script, config=config, sampling=sampling) as r:
        answer = await r.chat(tools=TOOLS, stream=stream)
        assert answer.status_code == 200
        if stream:
            assert '"name":"look"' in answer.text
            assert '"finish_reason":"tool_calls"' in answer.text
        else:
            (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
            assert (call["function"]["name"], call["function"]["arguments"]) == ("look", '{"key": "a"}')


async def test_a_turn_that_cannot_be_extended_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that stops at a token which the template does not write behind a turn."""
    foreign = Reply(ids=[*said("one").ids[:-1], EOS + 1], finish={"type": "stop", "matched": EOS + 1})
    with caplog.at_level(logging.WARNING, logger="rlagent.router.recorder"):
        async with router(tmp_path, in_turn(foreign)) as r:
            history = list(USER)
            for _ in range(3):
                answer = await r.chat(history)
                history = [*history, answer.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
            shown = (await r.http.get("/metrics")).text
    assert 'rlagent_full_renders_total{kind="foreign_stop"} 2' in shown
    assert len([one for one in caplog.messages if "rendered in full" in one]) == 1
