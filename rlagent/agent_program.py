"""An agent that is a program of its own: started with its session's base_url and key, bounded, its exit code and output kept.

In the flow: called by a rollout function, in place of agent code in Python. The program finds the router through the variables that
its SDK reads (OPENAI_BASE_URL, ANTHROPIC_BASE_URL, ...). In a sandbox without network it reaches the session's model calls through a
door and nothing else; in a sandbox with network, or in a directory of the host, it reaches what the host reaches.
Invariant: when `run_agent` returns or is cancelled (a rollout's timeout), nothing the program started is alive.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rlagent.agent_door import session_door
from rlagent.client import SessionHandle
from rlagent.errors import RolloutError
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, ExecResult, Sandbox
from rlagent.sandboxes.directory import exec_in

_TAIL_CHARS: Final = 2000  # of the output, in an error
# What a program in a directory gets of our environment: no key, no proxy and no setting of ours decides what a rollout does.
_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


async def run_agent(
    argv: Sequence[str], session: SessionHandle, place: Sandbox | Path, *, env: Mapping[str, str] | None = None,
    stdin: bytes | None = None, timeout_s: float | None = None, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
    check: bool = True,
) -> ExecResult:  # fmt: skip
    """Run an agent's program to its end in `place`: an open sandbox, or a directory of the host for a program that is trusted.

    `env` is added to the session's variables and to PATH and the like; HOME is the working directory, so a program finds no settings of
    the user's. timeout_s counts from its start, in a sandbox within its limits' wall_s. How it ended is data; with `check`, any end
    but exit code 0 is a RolloutError that tells how, and the end of what it said. SandboxError if it could not be started.
    """
    if isinstance(place, Path):
        given, run = _environ(place, session), partial(exec_in, place, argv)
    elif place.network:
        given, run = session.environ(), partial(place.exec, argv)
    else:
        door, inside = session_door(session)
        given, run = inside.environ(), partial(place.exec, argv, door=door)
    done = await run(
        env=given | dict(env or {}), stdin=stdin, timeout_s=timeout_s, output_limit_bytes=output_limit_bytes
    )
    if check and not done.ok:
        raise RolloutError(f"the agent program {argv[0]!r} {_fate(done)}; it said:\n{_tail(done)}")
    return done


def _environ(directory: Path, session: SessionHandle) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return inherited | {"HOME": os.path.abspath(directory)} | session.environ()


def _fate(done: ExecResult) -> str:
    if done.timed_out:
        return f"was ended after {done.wall_s:.0f} s, its time being up"
    memory = " for want of memory" if done.out_of_memory else ""
    return (f"was ended by signal {done.signal}" if done.signal else f"exited with code {done.exit_code}") + memory


def _tail(done: ExecResult) -> str:
    """The end of what was kept, stderr last."""
    said = (done.stdout + b"\n" + done.stderr).decode(errors="replace").strip()
    return said[-_TAIL_CHARS:] or "(nothing)"
