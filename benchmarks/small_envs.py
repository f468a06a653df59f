"""Two environments learned by a small model from the loop itself, three seeds each: the table of docs/small_envs.md. Not part of CI.

    python benchmarks/small_envs.py [--names sums coin --seeds 0 1 2 --runs runs/small-envs --out runs/small-envs/table.md]

A model that is not there yet is made first (examples/small_envs/warm_start.py); a run that is done already is read, not made again.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "small_envs"
SHOWN = ("environment", "seed", "before", "after", "steps", "rollouts", "wall s", "processor s", "load")


def run(name: str, seed: int, directory: Path) -> dict[str, Any]:
    """Train once; the run's row, which it keeps beside its metrics."""
    kept = directory / "row.json"
    if not kept.exists():
        start, spent, load = time.perf_counter(), _children_s(), os.getloadavg()[0]
        command = [sys.executable, "-m", "rlagent.cli", "train", "--config", str(EXAMPLE / f"{name}.toml")]
        subprocess.run([*command, "--run-dir", str(directory), "--set", f"run.seed={seed}"], check=True)
        wall_s, processor_s = time.perf_counter() - start, _children_s() - spent
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        success = [record["eval/success"] for record in records if "eval/success" in record]
        steps = [record for record in records if record["step"] > 0]
        rollouts = sum(int(record["data/num_rollouts"]) for record in steps)
        values = (name, seed, success[0], success[-1], len(steps), rollouts, round(wall_s), round(processor_s), load)
        kept.write_text(json.dumps(dict(zip(SHOWN, values, strict=True))))
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Make what is missing, train all, write the page after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=["sums", "coin"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/small-envs"))
    parser.add_argument("--out", type=Path, help="default: table.md in the folder of the runs")
    args = parser.parse_args()
    out = args.out or args.runs / "table.md"
    lines = [
        "# Environments learned by a small model",
        "",
        f"Made by `python benchmarks/small_envs.py` on {machine()}.",
        "Configurations, tasks and the careless models that runs start from: [examples/small_envs](../examples/small_envs/README.md).",
        "Success, at temperature 1, is on 128 held-out tasks, before the first and after the last step; rewards are the environments' own.",
        "Processor seconds are of all processes of a run; load is the machine's when the run began.",
        "",
        "| " + " | ".join(SHOWN) + " |",
        "|" + "---|" * len(SHOWN),
    ]
    for name in args.names:
        if not (EXAMPLE / name / "model").exists():
            subprocess.run([sys.executable, str(EXAMPLE / "warm_start.py"), name], check=True)
        for seed in args.seeds:
            row = run(name, seed, args.runs / f"{name}-{seed}")
            lines.append("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
            print(lines[-1], flush=True)
            out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
