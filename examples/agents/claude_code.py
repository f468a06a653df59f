"""Claude Code (npm @anthropic-ai/claude-code), the program itself, over Anthropic's messages, inside a sandbox with one door."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any, Final

from coding_task import program, reward, workplace

from rlagent.agent_program import run_agent

OPTIONS: Final = (
    "--model", "policy",
    "--dangerously-skip-permissions",  # the sandbox is the boundary
    "--bare",  # no hooks, plugins, memories, and no calls beside the agent's own
    "--tools", "Bash", "--system-prompt", "You are a coding agent.",  # 600 prompt tokens instead of 12,000
    "--max-turns", "20",
)  # fmt: skip
ENVIRON: Final = {
    "IS_SANDBOX": "1",  # without it, it refuses to skip permissions as root
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line in the system prompt that changes from run to run
}


async def rollout(task: Mapping[str, Any], session: Any) -> float:
    """One coding task (see coding_task.py)."""
    claude = program("claude", shutil.which("claude"))
    async with workplace(task, readable=[claude.parent]) as sandbox:
        await run_agent([str(claude), "-p", task["task"], *OPTIONS], session, sandbox, env=ENVIRON, timeout_s=600)
        return await reward(task, sandbox)
