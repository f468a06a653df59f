"""Makes what a run of `sums.toml` or `coin.toml` starts from: tasks, held-out tasks, and a small model of a careless player.

    python examples/small_envs/warm_start.py coin       # writes examples/small_envs/coin/

The model learns first from a player that is never careless, so that it can do what it seldom does afterwards; then from the careless
one. Architecture and training are the demo's (examples/parcels/make_model.py). Everything is seeded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "parcels")]

import coin  # noqa: E402
import make_model  # noqa: E402
import sums  # noqa: E402

ENVIRONMENTS: Final[dict[str, ModuleType]] = {"sums": sums, "coin": coin}
CARELESS: Final = {"sums": 0.7, "coin": 0.75}
"""Shares of guesses and of thoughtless turns: success starts near a third."""

NUM_TRAIN: Final = {"sums": 2500, "coin": 400}
NUM_HELDOUT: Final = 128
NUM_CONVERSATIONS: Final = 1200
"""Of each player at least: an episode that is played again goes another way."""
NUM_STEPS: Final = {"sums": 700, "coin": 200}
EXPERT_SHARE: Final = 0.5


def make(
    name: str, out: Path, *, seed: int = 0, num_steps: int, num_train: int | None = None,
    num_heldout: int = NUM_HELDOUT,
) -> None:  # fmt: skip
    """Write train.jsonl, heldout.jsonl and model/ into a directory."""
    environment = ENVIRONMENTS[name]
    train, heldout = environment.tasks(num_train or NUM_TRAIN[name], num_heldout)
    out.mkdir(parents=True, exist_ok=True)
    for file, tasks in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        (out / file).write_text("".join(json.dumps(task) + "\n" for task in tasks))
    rng = random.Random(seed)
    played = list(itertools.islice(itertools.cycle(train), max(len(train), NUM_CONVERSATIONS)))
    careful = environment.conversations(played, 0.0, rng)
    careless = environment.conversations(played, CARELESS[name], rng)
    template = (HERE.parent / "parcels" / "chat_template.jinja").read_text()
    tokenizer = make_model.train_tokenizer(_corpus(careful + careless), template, environment.VOCAB_SIZE)
    kinds = [[make_model.make_example(tokenizer, found, []) for found in half] for half in (careful, careless)]
    longest = max(len(example.token_ids) for example in itertools.chain(*kinds))
    print(f"{name}: {len(train)} tasks, {len(heldout)} held out, conversations of up to {longest} tokens", flush=True)

    def batch(step: int) -> list[Any]:
        return rng.sample(kinds[step >= EXPERT_SHARE * num_steps], make_model.BATCH_SIZE)

    model = make_model.fit(tokenizer, batch, num_steps=num_steps, seed=seed)
    make_model.save(model, tokenizer, out / "model")


def _corpus(conversations: list[list[dict[str, Any]]]) -> Iterator[str]:
    """What is said, and every number often enough to be one token."""
    yield from (message["content"] for conversation in conversations for message in conversation)
    yield from (str(number) for number in range(100) for _ in conversations)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENVIRONMENTS)
    parser.add_argument("--out", type=Path, help="directory to write; default NAME/ beside this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the environment's own")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in a fixed order: a second run gives the same weights on the same machine
    make(args.name, args.out or HERE / args.name, seed=args.seed, num_steps=args.steps or NUM_STEPS[args.name])
