"""One rollout: call the user's function with a task and a session, and turn whatever happens into data.

A rollout function returns a number, a mapping of named components, or an rlagent.types.Reward. Raising, hanging and returning
something else are outcomes too: the rollout failed, with the reason and the traceback kept, and the run goes on.
"""

import asyncio
import inspect
import json
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlagent.errors import LoadError, RolloutError
from rlagent.types import Reward

RolloutFunction = Callable[..., Any]
Task = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended. status: "completed" (reward is set), "error", "timeout" or "interrupted" (it may be tried again)."""

    status: str
    reward: Reward | None = None
    error: str = ""


async def run_rollout(function: RolloutFunction, task: Task, session: Any, timeout_s: float) -> Outcome:
    """Run an `async def` or a plain `def` rollout function. A plain one blocks this process: give it one of its own."""
    try:
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(timeout_s):
                value = await function(task, session)
        else:
            value = function(task, session)
        return Outcome(status="completed", reward=to_reward(value))
    except TimeoutError:
        return Outcome(status="timeout", error=f"the rollout took longer than rollout.timeout_s = {timeout_s}")
    except Exception:  # the boundary to the user's code: raising is data
        return Outcome(status="error", error=traceback.format_exc())


def to_reward(value: object) -> Reward:
    """A rollout's return value as a Reward. RolloutError when it is not one, or not finite."""
    failed: Mapping[str, str] = {}
    if isinstance(value, Reward):
        components: Mapping[str, object] = value.components
        calls: Mapping[str, object] = value.calls
        failed = value.failed
    elif isinstance(value, Mapping):
        components, calls = value, {}
    else:
        components, calls = {"reward": value}, {}
    return Reward(
        components={str(name): _finite(f"reward {name!r}", item) for name, item in components.items()},
        calls={str(name): _finite(f"reward of call {name!r}", item) for name, item in calls.items()},
        failed={str(name): str(how) for name, how in failed.items()},
    )


def _finite(what: str, value: object) -> float:
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, numbers.Real):
        raise RolloutError(f"{what} is {value!r}; a reward must be finite")
    raise RolloutError(
        f"{what} is {value!r} of type {type(value).__name__}; a rollout function returns a number, a dict of numbers "
        "or rlagent.Reward"
    )


def read_tasks(path: Path) -> list[Task]:
    """Read a JSON-lines file of tasks. LoadError names the file and the line of the first broken one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"task file {str(path)!r} cannot be read: {error}") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except json.JSONDecodeError as error:
            raise LoadError(
                f"{path}:{number}: not valid JSON ({error.msg}, at character {error.colno}); each line is one task object"
            ) from error
        if not isinstance(task, dict):
            raise LoadError(f"{path}:{number}: a task is a JSON object, not {type(task).__name__}")
        tasks.append(task)
    if not tasks:
        raise LoadError(f"task file {str(path)!r} holds no task; write one JSON object a line")
    return tasks


def task_id(task: Task, index: int) -> str:
    """A task's own `id`, else its place in the file."""
    return str(task["id"]) if "id" in task else f"task-{index}"
