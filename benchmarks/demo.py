"""The demo with several seeds: held-out success before and after, wall-clock time, and seconds per stage of a step.

python benchmarks/demo.py --seeds 0 1 2 --out runs/seeds
Prints a table; exits with 1 when a seed misses the goal (at most 0.45 before, at least 0.90 after, within --limit-s).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

CONFIG = Path(__file__).parents[1] / "examples" / "parcels" / "run.toml"
STAGES = ("rollout", "train", "sync", "checkpoint", "eval")


def run_seed(seed: int, config: Path, out: Path, settings: list[str]) -> dict[str, Any]:
    """Train once; the figures of the run."""
    directory = out / f"seed-{seed}"
    sets = [part for setting in (f"run.seed={seed}", *settings) for part in ("--set", setting)]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "rlagent.cli", "train", "--config", str(config), "--run-dir", str(directory), *sets],
        check=True,
    )
    elapsed_s = time.perf_counter() - start
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    success = [record["eval/success"] for record in records if "eval/success" in record]
    steps = [record for record in records if record["step"] > 0]
    return {
        "seed": seed,
        "before": success[0],
        "after": success[-1],
        "steps": len(steps),
        "wall_s": elapsed_s,
        "step_s": statistics.mean(record["time/step_s"] for record in steps),
        **{stage: statistics.mean(record.get(f"time/{stage}_s", 0.0) for record in steps) for stage in STAGES},
        "mismatch": max(record.get("mismatch/abs_max", 0.0) for record in steps),
    }


def main() -> int:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs") / time.strftime("seeds-%Y%m%d-%H%M%S"))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    args = parser.parse_args()
    where = machine()
    found = [run_seed(seed, args.config, args.out, args.settings) for seed in args.seeds]
    columns = list(found[0])
    print(f"\n{where}\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in found:
        print("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    return int(any(row["before"] > 0.45 or row["after"] < 0.90 or row["wall_s"] > args.limit_s for row in found))


if __name__ == "__main__":
    sys.exit(main())
