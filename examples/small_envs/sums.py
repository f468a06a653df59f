"""Three one-digit numbers are added and subtracted: reasoning-gym's `chain_sum`, played by one who often guesses.

Worked out step by step an answer is always right; a guess is right once in some thirty.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Final

from rlagent.envs import reasoning

Message = dict[str, Any]

NUMBERS: Final = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
HELDOUT_SEED: Final = 10**6
GUESSES: Final = range(-18, 28)  # every result that there is
VOCAB_SIZE: Final = 384  # the phrases, and the numbers that occur


def tasks(num_train: int, num_heldout: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tasks to train on, and to evaluate on: no question is in both."""
    train = list(reasoning.tasks("chain_sum", num_train, config=NUMBERS))
    known = [task["question"] for task in train]
    return train, list(reasoning.tasks("chain_sum", num_heldout, seed=HELDOUT_SEED, config=NUMBERS, without=known))


def conversations(tasks: Sequence[dict[str, Any]], careless: float, rng: random.Random) -> list[list[Message]]:
    """One a task: a guess with this chance, otherwise worked out."""
    return [
        [
            {"role": "user", "content": task["question"]},
            {"role": "assistant", "content": guess(rng) if rng.random() < careless else work_out(task["question"])},
        ]
        for task in tasks
    ]


def guess(rng: random.Random) -> str:
    return f"<answer>{rng.choice(GUESSES)}</answer>"


def work_out(question: str) -> str:
    """ "... problem: 4 - 1 - 7 =" becomes "4 - 1 = 3, 3 - 7 = -4. <answer>-4</answer>"."""
    first, *rest = re.findall(r"[-+]? ?\d+", question.split(": ")[1])
    total, steps = int(first), []
    for term in rest:
        result = total + int(term.replace(" ", ""))
        steps.append(f"{total} {term} = {result}")
        total = result
    return f"{', '.join(steps)}. <answer>{total}</answer>"
