"""Unmodified agents in Python, each in its own process against the router: a linear run is one chain, masked where it was sampled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_rows import Turns, calls, check_one_chain, check_rewritten, check_row, wide_model
from router_harness import Harness, router
from sandbox_backends import needs_bwrap

from rlagent.agent_program import run_agent
from rlagent.client import SessionHandle

pytestmark = [pytest.mark.agents, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
PLAY = ROOT / "tests" / "agents" / "play.py"
PARCEL = {"id": "p", "customer": "Mia", "order": 41, "depot": "Kale", "code": 57}
LOOKS = (
    calls(("find_order", '{"customer": "Mia"}'), text="I look it up."),
    calls(("track_parcel", '{"order":41}')),  # other spaces than any JSON writer's
    calls(("pickup_code", '{"order": 41, "depot": "Kale"}')),
)
ANSWER = "The code is 57."
PARCELS = {
    "openai SDK": ("examples/parcels/rollout.py:rollout", (*LOOKS, ANSWER)),
    "openai-agents, Responses": ("examples/agents/openai_agents.py:rollout", (*LOOKS, ANSWER)),
    "openai-agents, chat": ("examples/agents/openai_agents.py:rollout_chat", (*LOOKS, ANSWER)),
    "pydantic-ai, chat": ("examples/agents/pydantic_ai_agent.py:rollout", (*LOOKS, ANSWER)),
    "pydantic-ai, messages": ("examples/agents/pydantic_ai_agent.py:rollout_anthropic", (*LOOKS, ANSWER)),
    "langgraph": ("examples/agents/langgraph_agent.py:rollout", (*LOOKS, ANSWER)),
}


@dataclass(frozen=True, kw_only=True)
class Play:
    """One rollout in the agents' environment."""

    python: str
    directory: Path

    async def __call__(self, spec: str, task: dict[str, Any], session: SessionHandle) -> float:
        argv = [self.python, str(PLAY), str(ROOT / spec), json.dumps(task), session.session_id]
        env = {"PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
        done = await run_agent(argv, session, self.directory, env=env, timeout_s=180)
        outcome = json.loads(done.stdout.decode().strip().rpartition("\n")[2])
        assert outcome["status"] == "completed", outcome["error"]
        return float(outcome["reward"])


@pytest.fixture
def play(agents_python: str, tmp_path: Path) -> Play:
    return Play(python=agents_python, directory=tmp_path)


async def _session(harness: Harness) -> SessionHandle:
    return await harness.admin.new_session(task_id="t")


@pytest.mark.parametrize("name", PARCELS)
async def test_an_agent_that_looks_three_things_up_is_one_chain(name: str, play: Play, tmp_path: Path) -> None:
    spec, texts = PARCELS[name]
    turns = Turns(*texts)
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await _session(harness)
        reward = await play(spec, PARCEL, session)
        assert reward == 1.0
        await check_one_chain(harness, session.session_id, turns, reward=reward)


async def test_smolagents_writes_its_calls_anew_as_text_so_each_is_a_row(play: Play, tmp_path: Path) -> None:
    turns = Turns(*LOOKS, calls(("final_answer", '{"answer": "The code is 57."}')))
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await _session(harness)
        reward = await play("examples/agents/smolagents_agent.py:rollout", PARCEL, session)
        assert reward == 1.0
        await check_rewritten(harness, session.session_id, turns, reward=reward)


@needs_bwrap
async def test_mini_swe_agent_works_in_a_sandbox(play: Play, tmp_path: Path) -> None:
    texts = (
        calls(("bash", '{"command": "ls; wc -l < words.txt"}'), text="What is there?"),
        calls(("bash", '{"command": "wc -l < words.txt > count.txt; cat /proc/net/dev | wc -l"}')),
        calls(("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')),
    )
    turns = Turns(*texts)
    task = {
        "task": "Count the lines of words.txt into count.txt.",
        "files": {"words.txt": "one\ntwo\nthree\n"},
        "check": 'test "$(cat count.txt)" = 3',
    }
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await _session(harness)
        reward = await play("examples/agents/mini_swe_agent.py:rollout", task, session)
        assert reward == 1.0
        await check_one_chain(harness, session.session_id, turns, reward=reward)


@needs_bwrap
async def test_a_turn_that_mini_swe_agent_drops_is_a_row_of_its_own(play: Play, tmp_path: Path) -> None:
    """What it cannot read it leaves out of its history, and asks again: nothing goes on from that turn, and it is trained on."""
    submit = calls(("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'))
    turns = Turns("I do not call anything.", calls(("bash", '{"command": "echo 1 > done"}')), submit)
    async with router(tmp_path, turns.script, model=wide_model(tmp_path)) as harness:
        session = await _session(harness)
        task = {"task": "Make a file.", "check": "test -f done"}
        assert await play("examples/agents/mini_swe_agent.py:rollout", task, session) == 1.0
        await harness.admin.finish(session.session_id, reward=1.0)
        dropped, rest = await harness.admin.trajectories(session.session_id)
        prompts = [body["input_ids"] for body in harness.engine.requests]
        check_row(dropped, prompts[:1], turns.said[:1])
        check_row(rest, prompts[1:], turns.said[1:])
