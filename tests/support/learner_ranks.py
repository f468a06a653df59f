"""Ranks of a learner as processes of their own, running one of the scripts beside this file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_models import free_ports

LIMIT_S = 900


def launch(script: str, world: int, layouts: list[dict[str, Any]], model_dir: Path, out: Path) -> None:
    """Run `script RANK WORLD PORT MODEL OUT LAYOUTS` on each rank to its end; the first failure ends the others."""
    port = free_ports(len(layouts))
    arguments = [str(world), str(port), str(model_dir), str(out), json.dumps(layouts)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for number, rank in enumerate(ranks):
            output, _ = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, f"rank {number} of {world}:\n{output[-4000:]}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
