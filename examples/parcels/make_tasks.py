"""Writes the demo's task files: tasks.jsonl to train on and heldout.jsonl to evaluate on; they share no task.

python examples/parcels/make_tasks.py
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from rlagent.envs.parcels import Split, generate_tasks


def write_tasks(path: Path, split: Split, num_tasks: int, seed: int) -> None:
    lines = [task.to_line() for task in islice(generate_tasks(split, seed=seed), num_tasks)]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {num_tasks} tasks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="directory to write into")
    parser.add_argument("--num-train", type=int, default=2048)
    parser.add_argument("--num-heldout", type=int, default=512)
    # Not the warm start's seed 0, so that the model has not seen these very tasks.
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write_tasks(args.out / "tasks.jsonl", "train", args.num_train, args.seed)
    write_tasks(args.out / "heldout.jsonl", "heldout", args.num_heldout, args.seed)


if __name__ == "__main__":
    main()
