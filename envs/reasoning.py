"""reasoning-gym (extra `envs`): any of its data sets by name, one question and one answer a task.

    python -m rlagent.envs.reasoning spell_backward --num 500 --config '{"max_word_len": 5}' > tasks.jsonl
    rlagent train --rollout-function-path rlagent.envs.reasoning:rollout --tasks tasks.jsonl ...

Invariant: a task's line rebuilds the entry that it was made of, or the rollout fails and says that the package is another version.
Entry i of seed s is entry 0 of seed s + i: keep the seeds of training and held-out tasks further apart than their numbers.
"""

import argparse
import difflib
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from rlagent.ending import plain_errors
from rlagent.envs.converse import converse
from rlagent.envs.verifiers import Attempt, Check, Isolated, Rubric
from rlagent.envs.verifiers.attempt import Endpoint
from rlagent.errors import ConfigError, LoadError
from rlagent.rollout import read_tasks
from rlagent.types import Reward


@functools.cache
def _dataset(name: str, seed: int, config: str) -> Any:
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5)
        hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"reasoning-gym has no data set {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=1, **json.loads(config))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym's data set {name!r} with the settings {config}: {error}") from error


def entry(name: str, seed: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a seed. ConfigError for an unknown data set or setting."""
    found: dict[str, Any] = _dataset(name, seed, json.dumps(config, sort_keys=True))[0]
    return found


def tasks(
    name: str, num: int, *, seed: int = 0, config: Mapping[str, Any] | None = None, instruction: str = "",
    without: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """So many tasks with questions of their own, none of `without`. ConfigError when the data set has too few."""
    seen = set(without)
    num_made = 0
    for at in range(seed, seed + 10 * num + 100):
        question = entry(name, at, config or {})["question"]
        if question not in seen and num_made < num:
            seen.add(question)
            num_made += 1
            task = {
                "id": f"{name}-{at}",
                "dataset": name,
                "seed": at,
                "config": dict(config or {}),
                "question": question,
            }
            yield task | ({"instruction": instruction} if instruction else {})
    if num_made < num:
        raise ConfigError(
            f"{name} has {num_made} questions with these settings, not {num}; ask for fewer or widen them"
        )


def score(attempt: Attempt) -> float:
    """reasoning-gym's own score, 0 to 1, of what stands in <answer> tags, or of the whole answer."""
    task = attempt.task
    made = entry(task["dataset"], task["seed"], task["config"])
    if made["question"] != task["question"]:
        raise LoadError(f"task {task['id']} was made by another version of reasoning-gym; make the tasks again")
    answer = extract_answer(attempt.answer)
    data = _dataset(task["dataset"], task["seed"], json.dumps(task["config"], sort_keys=True))
    return float(data.score_answer(attempt.answer.strip() if answer is None else answer, entry=made))


@functools.cache
def _rubric() -> Rubric:
    # In a process of its own: some data sets raise on text that they do not expect, or take very long.
    return Rubric([Check(name="score", verifier=Isolated("rlagent.envs.reasoning:score"), timeout_s=20)])


async def rollout(task: Mapping[str, Any], session: Endpoint) -> Reward:
    """Ask once; the reward is the data set's score."""
    system = [{"role": "system", "content": task["instruction"]}] if "instruction" in task else []
    attempt = await converse(session, task, [*system, {"role": "user", "content": task["question"]}], max_turns=1)
    return await _rubric().reward(attempt)


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, e.g. '{{\"max_value\": 20}}'")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Write tasks as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m rlagent.envs.reasoning", description=main.__doc__)
    parser.add_argument("dataset", help="a name of reasoning-gym's, e.g. spell_backward")
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first task; the following count up")
    parser.add_argument("--config", type=_settings, default={}, help="the data set's settings as JSON")
    parser.add_argument("--instruction", default="", help="a system message")
    parser.add_argument("--without", type=Path, help="a task file whose questions are left out")
    given = parser.parse_args(argv)
    known: list[str] = []
    if given.without is not None:
        known = [task["question"] for task in read_tasks(given.without)]
    for task in tasks(
        given.dataset, given.num, seed=given.seed, config=given.config, instruction=given.instruction, without=known
    ):
        sys.stdout.write(json.dumps(task) + "\n")


if __name__ == "__main__":
    with plain_errors():
        main()
