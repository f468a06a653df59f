"""What the coding agents here have in common: a task's files in a sandbox, and the check that tells whether it was done.

A task is {"task": what to do, "check": a shell command that exits with 0 when it was done, "files": {path: text}}.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rlagent.errors import RolloutError
from rlagent.sandboxes.base import Limits, Sandbox
from rlagent.sandboxes.process import ProcessSandbox

# No bound of memory: without control groups it would be one of address space, and a JavaScript engine reserves far more than it uses.
LIMITS = Limits(wall_s=900, cpu_s=300, memory_bytes=None, pids=512, open_files=4096)


@asynccontextmanager
async def workplace(task: Mapping[str, Any], readable: Sequence[Path] = ()) -> AsyncIterator[Sandbox]:
    """A sandbox without network that holds the task's files, and sees `readable` of the host."""
    async with ProcessSandbox(limits=LIMITS, readable=readable) as sandbox:
        for path, text in task.get("files", {}).items():
            await sandbox.write(path, text.encode())
        yield sandbox


async def reward(task: Mapping[str, Any], sandbox: Sandbox) -> float:
    """1.0 where the check passes, otherwise 0.0."""
    return float((await sandbox.exec(["sh", "-c", task["check"]])).ok)


def program(name: str, found: str | None) -> Path:
    """The file of an installed program. RolloutError where there is none."""
    if found is None:
        raise RolloutError(f"{name!r} is not on the PATH; tests/agents/make_npm.sh installs it and prints where")
    return Path(found).resolve()
