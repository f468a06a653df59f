"""The demo learns with each of some algorithms: held-out success before and after, as a table. `make learn-matrix`.

    python benchmarks/learn_matrix.py [--recipes grpo rloo ppo cispo gspo --steps 16 --out docs/learn_matrix.md --runs runs/learn-matrix]

Each is `rlagent train` with examples/recipes/NAME.toml; a run that is done already is read, not trained again. Not part of CI.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
DEFAULT = ("grpo", "rloo", "ppo", "cispo", "gspo")
# GSPO's published clip (3e-4, 4e-4) is for sequences of thousands of tokens; the demo's have tens, and their mean ratio moves more.
SETTINGS = {"gspo": ("learner.loss.clip_low=0.03", "learner.loss.clip_high=0.04")}


def train(recipe: str, directory: Path, settings: list[str]) -> float:
    """Train one; seconds it took (0 where it was done already)."""
    if (directory / "model").exists():
        return 0.0
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "rlagent.cli",
        "train",
        "--config",
        str(ROOT / "examples/recipes" / f"{recipe}.toml"),
    ]
    command += ["--run-dir", str(directory)]
    for setting in (*SETTINGS.get(recipe, ()), *settings):
        command += ["--set", setting]
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def row(recipe: str, directory: Path) -> str:
    """A line of the table, from the run's metrics."""
    records: list[dict[str, Any]] = [
        json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    success = [record["eval/success"] for record in records if "eval/success" in record]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    steps = max(record["step"] for record in records)
    settings = ", ".join(SETTINGS.get(recipe, ())) or "-"
    return f"| {recipe} | {steps} | {success[0]:.3f} | {success[-1]:.3f} | {rewards[0]:.3f} | {rewards[-1]:.3f} | {settings} |"


def main() -> None:
    """Train all, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=list(DEFAULT))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--runs", type=Path, default=Path("runs/learn-matrix"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "learn_matrix.md")
    args = parser.parse_args()
    lines = [
        "# The demo learns with each of these",
        "",
        f"Made by `make learn-matrix` on {machine()}; the recipes of examples/recipes/, seed 0, everything else the demo's.",
        "Success is on the first 48 of the demo's held-out tasks (`eval.num_tasks=48`), "
        "before the first and after the last step; reward is the mean of a step's rollouts.",
        "",
        "| recipe | steps | success before | after | reward at the first step | at the last | other settings |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in args.recipes:
        train(recipe, args.runs / recipe, [f"run.steps={args.steps}", "eval.num_tasks=48", *args.settings])
        lines.append(row(recipe, args.runs / recipe))
        print(lines[-1], flush=True)
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
