"""Claude Code and Codex, the unmodified programs, in a sandbox whose one door is their session: one chain, the task's check passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_rows import Turns, calls, check_one_chain, check_row, wide_model
from router_harness import router
from sandbox_backends import needs_bwrap

from rlagent.agent_program import run_agent
from rlagent.loading import load_function
from rlagent.rollout import Outcome, run_rollout
from rlagent.types import Reward

pytestmark = [pytest.mark.agents, pytest.mark.slow, needs_bwrap]
ROOT = Path(__file__).resolve().parents[2]
TASK = {
    "task": "Count the lines of words.txt into count.txt.",
    "files": {"words.txt": "one\ntwo\nthree\n"},
    "check": 'test "$(cat count.txt)" = 3',
}
TOOLS = {"claude_code": ("Bash", "command", "messages"), "codex": ("exec_command", "cmd", "responses")}
TIMEOUT_S = 240.0


SUB_AGENT = calls(("Agent", '{"description": "Count", "prompt": "How many?", "subagent_type": "general-purpose"}'))


@pytest.fixture
def programs(agents_bin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", agents_bin, prepend=":")


def texts_of(agent: str) -> tuple[str, ...]:
    """Look, write the answer (its JSON unlike any writer's), see that there is no way out but the model, end."""
    tool, argument, _ = TOOLS[agent]
    commands = ("ls && wc -l < words.txt", "wc -l <words.txt  >count.txt; cat /proc/net/route | wc -l")
    first, second = (f'{{"{argument}":"{command}"}}' for command in commands)
    return calls((tool, first), text="What is there?"), calls((tool, second)), "It has three lines."


async def play(agent: str, session: Any) -> Outcome:
    function = load_function(str(ROOT / "examples" / "agents" / f"{agent}.py:rollout"), what="rollout function")
    return await run_rollout(function, TASK, session, TIMEOUT_S)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("agent", TOOLS)
async def test_a_coding_agent_is_one_chain(agent: str, tmp_path: Path) -> None:
    turns = Turns(*texts_of(agent))
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await harness.admin.new_session(task_id="t")
        outcome = await play(agent, session)
        assert outcome == Outcome(status="completed", reward=Reward(components={"reward": 1.0})), outcome.error
        await check_one_chain(harness, session.session_id, turns, reward=1.0)
        recorded = await harness.admin.calls(session.session_id)
        assert {call["dialect"] for call in recorded} == {TOOLS[agent][2]}
        assert {call["delivery"] for call in recorded} == {"delivered"}


@pytest.mark.usefixtures("programs")
async def test_a_sub_agent_of_claude_code_is_a_row_of_its_own(tmp_path: Path) -> None:
    turns = Turns(SUB_AGENT, calls(("Bash", '{"command": "echo 3"}')), "Three lines.", "The sub-agent says three.")
    argv = ["claude", "-p", "Ask a sub-agent.", "--model", "policy", "--dangerously-skip-permissions"]
    env = {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await harness.admin.new_session(task_id="t")
        done = await run_agent([*argv, "--tools", "Bash,Agent"], session, tmp_path, env=env, timeout_s=TIMEOUT_S)
        assert done.stdout.decode().strip() == "The sub-agent says three."
        await harness.admin.finish(session.session_id, reward=0.5)
        rows = await harness.admin.trajectories(session.session_id)
        prompts = [body["input_ids"] for body in harness.engine.requests]
        of_turns = {tuple(row["token_ids"]): row for row in rows}
        for first, last in ((0, 3), (1, 2)):  # the agent around its sub-agent
            row = of_turns.pop((*prompts[last], *turns.said[last].ids))
            check_row(row, [prompts[first], prompts[last]], [turns.said[first], turns.said[last]])
            assert row["reward"] == 0.5
        assert not of_turns


@pytest.mark.usefixtures("programs")
async def test_codex_with_all_its_tools_calls_one_of_a_namespace(tmp_path: Path) -> None:
    turns = Turns(calls(("multi_agent_v1.close_agent", '{"target": "nobody"}')), "There is none.")
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await harness.admin.new_session(task_id="t")
        provider = f'{{name="r", base_url="{session.base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
        settings = ("-c", 'model_provider="r"', "-c", f"model_providers.r={provider}", "--model", "policy")
        argv = ["codex", "exec", "--skip-git-repo-check", *settings, "Close the agent nobody."]
        await run_agent(argv, session, tmp_path, timeout_s=TIMEOUT_S)
        await check_one_chain(harness, session.session_id, turns, reward=1.0)
        _, second = await harness.admin.calls(session.session_id)
        (result,) = second["messages"]
        assert "unsupported call" not in result["content"]  # what it says of a name that it does not know
        assert [tool["type"] for tool in second["client"]["ignored"]["tools"]] == ["web_search"]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("agent", TOOLS)
async def test_a_call_that_is_no_json_and_one_with_wrong_arguments_stay_in_the_chain(
    agent: str, tmp_path: Path
) -> None:
    """A broken call is served as text and ends the run, arguments of another form come back as the agent's own complaint."""
    tool, _, _ = TOOLS[agent]
    turns = Turns(calls((tool, '{"wrong": 1}')), calls((tool, '{"command": "ls')))
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await harness.admin.new_session(task_id="t")
        outcome = await play(agent, session)
        assert (outcome.status, outcome.reward and outcome.reward.total) == ("completed", 0.0), outcome.error
        await check_one_chain(harness, session.session_id, turns, reward=0.0)
        recorded = await harness.admin.calls(session.session_id)
        assert [call["choices"][0]["parse_status"] for call in recorded] == ["tool_calls", "malformed"]
