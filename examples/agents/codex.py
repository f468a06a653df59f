"""Codex (npm @openai/codex), the program itself, over OpenAI's Responses, inside a sandbox with one door."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any, Final

from coding_task import program, reward, workplace

from rlagent.agent_program import run_agent

HOME: Final = "codex_home"  # of its settings, beside the task's files
# The provider's address is the session's: as a program inside the sandbox sees it, in a variable.
CONFIG: Final = """
model = "policy"
model_provider = "rlagent"
model_context_window = 32768
model_instructions_file = "/work/codex_home/instructions.md"
web_search = "disabled"
analytics.enabled = false
include_permissions_instructions = false
features.multi_agent = false
features.goals = false
skills.include_instructions = false

[model_providers.rlagent]
name = "rlagent"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
START: Final = """
cat > codex_home/config.toml <<END
%s
END
exec "$0" exec --strict-config --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$1"
"""


async def rollout(task: Mapping[str, Any], session: Any) -> float:
    """One coding task (see coding_task.py)."""
    codex = program("codex", shutil.which("codex"))
    async with workplace(task, readable=[codex.parent.parent]) as sandbox:
        await sandbox.write(f"{HOME}/instructions.md", b"You are a coding agent.")
        argv = ["sh", "-c", START % CONFIG, str(codex), task["task"]]
        await run_agent(argv, session, sandbox, env={"CODEX_HOME": f"/work/{HOME}"}, timeout_s=600)
        return await reward(task, sandbox)
