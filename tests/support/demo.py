"""The demo as a child process, made small, for end-to-end tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "parcels" / "run.toml"
SMALL = ("run.steps=3", "rollout.group_size=4", "learner.batch.groups=2", "eval.num_tasks=8", "eval.every=100", "checkpoint.every=1",
         "sync.snapshot_every=1", "engine.max_running=16", "engine.max_total_tokens=16384")  # fmt: skip


def train_command(run_dir: Path, *settings: str, resume: bool = False, options: tuple[str, ...] = ()) -> list[str]:
    """`rlagent train` on the demo with small settings."""
    sets = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "rlagent.cli",
        "train",
        "--config",
        str(CONFIG),
        "--run-dir",
        str(run_dir),
        *sets,
        *options,
    ]
    return [*command, "--resume"] if resume else command


def command(*arguments: str, code: int = 0, timeout_s: float = 180.0) -> str:
    """Run `rlagent ARGUMENTS`; all its output. Fails with that output when it ends with another code."""
    done = subprocess.run(
        [sys.executable, "-m", "rlagent.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env=environ(),
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def train(
    run_dir: Path, *settings: str, resume: bool = False, options: tuple[str, ...] = (), timeout_s: float = 180.0
) -> str:
    """Run to the end; its output. Fails with that output when the command does."""
    done = subprocess.run(
        train_command(run_dir, *settings, resume=resume, options=options),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environ(),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(run_dir)}"
    return done.stdout


def environ() -> dict[str, str]:
    """The environment of a plain terminal of 120 columns."""
    return {**os.environ, "COLUMNS": "120", "TERM": "dumb"}


def logs(run_dir: Path) -> str:
    """The ends of all logs of a run."""
    return "\n".join(
        f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(run_dir.glob("logs/*"))
    )


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
