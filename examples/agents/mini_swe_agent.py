"""mini-swe-agent (through litellm, chat completions): the agent runs here, every command that its model writes in a sandbox."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping
from typing import Any

from coding_task import reward, workplace
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from rlagent.sandboxes.base import Sandbox

SYSTEM = "You work on a computer by shell commands. Run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` when you are done."
STEP_LIMIT = 20


class SandboxEnvironment(LocalEnvironment):
    """The agent's own environment, but for where commands run and what it tells the prompt of this machine."""

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._sandbox, self._loop = sandbox, loop

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        command = ["sh", "-c", f"({action['command']}\n) 2>&1"]
        running = self._sandbox.exec(command, cwd=cwd or ".", timeout_s=timeout or self.config.timeout)
        done = asyncio.run_coroutine_threadsafe(running, self._loop).result()
        output = {
            "output": done.stdout.decode(errors="replace"),
            "returncode": -1 if done.timed_out else done.exit_code,
        }
        output["exception_info"] = "the command took too long" if done.timed_out else ""
        self._check_finished(output)
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {**self.config.model_dump(), "system": platform.system(), **kwargs}


async def rollout(task: Mapping[str, Any], session: Any) -> float:
    """One coding task (see coding_task.py). The agent is synchronous: it runs in a thread, its sandbox on this loop."""
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": session.base_url, "api_key": session.api_key},
        cost_tracking="ignore_errors",
    )
    async with workplace(task) as sandbox:
        agent = DefaultAgent(
            model, SandboxEnvironment(sandbox, asyncio.get_running_loop()), system_template=SYSTEM,
            instance_template="{{task}}", step_limit=STEP_LIMIT,
        )  # fmt: skip
        await asyncio.to_thread(agent.run, task["task"])
        return await reward(task, sandbox)
