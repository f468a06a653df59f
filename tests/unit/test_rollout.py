"""Rollouts: what a function may return, and how each way of failing becomes an outcome."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rlagent.errors import LoadError, RolloutError
from rlagent.launch.rollout_pool import RolloutPool
from rlagent.rollout import read_tasks, run_rollout, to_reward
from rlagent.types import Reward

SESSION = {"session_id": "s", "base_url": "http://127.0.0.1:1/v1", "api_key": "k"}

FUNCTIONS = """
import asyncio, os, time

async def good(task, session):
    return {"correct": 1.0, "format": float(task["x"])}

async def raises(task, session):
    raise ValueError("the user's own")

async def hangs(task, session):
    await asyncio.Event().wait()

async def blocks(task, session):
    if task["x"]:
        while True:
            pass
    await asyncio.sleep(0.01)
    return 1.0

def plain(task, session):
    if task["x"] == 2:
        while True:
            time.sleep(0.01)
    return session.api_key == "k"

async def judged(task, session):
    import rlagent
    return rlagent.Reward(components={"right": 0.0}, calls={"c": 0.5}, failed={"right": "timeout"})

async def wrong(task, session):
    return "yes"

async def dies(task, session):
    os._exit(3)
"""


@pytest.mark.parametrize("value", [1, 0.5, True, {"a": 1.0, "b": 2}, Reward(components={"a": 1.0}, calls={"c": 0.5})])
def test_numbers_components_and_rewards_are_rewards(value: Any) -> None:
    assert isinstance(to_reward(value), Reward)


def test_components_sum_to_the_total() -> None:
    assert to_reward({"a": 1.0, "b": 0.25}).total == 1.25


@pytest.mark.parametrize("value", [None, "1", [1.0], {"a": None}, {"a": "x"}])
def test_another_type_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RolloutError, match="returns a number"):
        to_reward(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": float("-inf")}])
def test_a_reward_that_is_not_finite_is_refused(value: Any) -> None:
    with pytest.raises(RolloutError, match="finite"):
        to_reward(value)


async def test_raising_is_data_with_its_traceback() -> None:
    async def rollout(task: Any, session: Any) -> float:
        raise KeyError("missing")

    outcome = await run_rollout(rollout, {}, None, 1.0)
    assert outcome.status == "error"
    assert "KeyError: 'missing'" in outcome.error


async def test_a_timeout_is_told_from_an_error() -> None:
    async def rollout(task: Any, session: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    outcome = await run_rollout(rollout, {}, None, 0.01)
    assert outcome.status == "timeout"


def test_a_broken_line_of_a_task_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": 1}\n\n{"id": \n')
    with pytest.raises(LoadError, match=r"tasks\.jsonl:3: not valid JSON \(Expecting value, at character 8\)"):
        read_tasks(file)
    file.write_text("[1]\n")
    with pytest.raises(LoadError, match="JSON object"):
        read_tasks(file)
    file.write_text("\n")
    with pytest.raises(LoadError, match="no task"):
        read_tasks(file)


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def make_pool(functions: Path, name: str, **options: Any) -> RolloutPool:
    given = {"workers": 1, "concurrency": 4, "timeout_s": 20.0, **options}
    return RolloutPool(f"{functions}:{name}", logs=functions.parent, **given)


async def test_a_pool_runs_rollouts_side_by_side(functions: Path) -> None:
    async with make_pool(functions, "good") as pool:
        outcomes = await asyncio.gather(*(pool.run({"x": i}, SESSION) for i in range(10)))
    assert [outcome.reward.components["format"] for outcome in outcomes if outcome.reward] == list(range(10))


@pytest.mark.parametrize(("name", "status"), [("raises", "error"), ("wrong", "error"), ("dies", "interrupted")])
async def test_a_pool_outlives_its_failing_rollouts(functions: Path, name: str, status: str) -> None:
    async with make_pool(functions, name) as pool:
        outcomes = [await pool.run({"x": 0}, SESSION) for _ in range(2)]
    assert [outcome.status for outcome in outcomes] == [status, status]


async def test_a_failed_verifier_reaches_the_run_with_the_reward(functions: Path) -> None:
    async with make_pool(functions, "judged") as pool:
        outcome = await pool.run({"x": 1}, SESSION)
    assert outcome.reward == Reward(components={"right": 0.0}, calls={"c": 0.5}, failed={"right": "timeout"})


async def test_a_hanging_rollout_times_out(functions: Path) -> None:
    async with make_pool(functions, "hangs", timeout_s=0.1) as pool:
        assert (await pool.run({"x": 0}, SESSION)).status == "timeout"


@pytest.mark.slow
async def test_a_blocking_rollout_is_ended_and_its_mates_are_interrupted(functions: Path) -> None:
    async with make_pool(functions, "blocks", timeout_s=0.5) as pool:
        blocked, mate = await asyncio.gather(pool.run({"x": 1}, SESSION), pool.run({"x": 0}, SESSION))
        assert blocked.status == "timeout"
        assert mate.status in ("interrupted", "timeout", "completed")
        assert (await pool.run({"x": 0}, SESSION)).status == "completed"


async def test_a_plain_function_runs_in_a_process_that_a_timeout_can_end(functions: Path) -> None:
    async with make_pool(functions, "plain", workers=2, timeout_s=2.0) as pool:
        outcomes = await asyncio.gather(*(pool.run({"x": x}, SESSION) for x in (0, 2, 1)))
    assert [outcome.status for outcome in outcomes] == ["completed", "timeout", "completed"]


async def test_a_function_that_is_not_there_is_told_from_a_failing_import(functions: Path) -> None:
    with pytest.raises(LoadError, match="did you mean 'good'"):
        async with make_pool(functions, "god"):
            pass
    functions.write_text("import no_such_package_of_mine\n")
    with pytest.raises(LoadError, match="failed while it was imported"):
        async with make_pool(functions, "good"):
            pass
    assert "no_such_package_of_mine" not in sys.modules
