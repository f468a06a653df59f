"""A coin in one of four rooms, and six turns: TextWorld-Express's `coin`, played by one who often does anything at all.

Otherwise it takes the coin where it sees it, and where not it goes somewhere else: back only where there is no other way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

from rlagent.envs import textgame

Message = dict[str, Any]

ROOMS: Final = "numLocations=4,numDistractorItems=0,includeDoors=0,limitInventorySize=0"
MAX_TURNS: Final = 6
BACK: Final = {
    "move north": "move south",
    "move south": "move north",
    "move east": "move west",
    "move west": "move east",
}
VOCAB_SIZE: Final = 704  # the rooms, piece by piece


def tasks(num_train: int, num_heldout: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Episodes to train on, and others of the game's test fold to evaluate on: no map with its coin is in both."""
    given: dict[str, Any] = {"params": ROOMS, "max_turns": MAX_TURNS}
    train = textgame.tasks("coin", num_train, **given)
    candidates = textgame.tasks("coin", 4 * num_heldout, fold="test", **given)

    async def maps(games: textgame.Games, episodes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
        return [await _map(games, episode) for episode in episodes]

    async def both(games: textgame.Games) -> list[dict[str, Any]]:
        known = set(await maps(games, train))
        found = await maps(games, candidates)
        return [task for task, seen in zip(candidates, found, strict=True) if seen not in known]

    heldout = _played(both)
    assert len(heldout) >= num_heldout, f"only {len(heldout)} episodes are new"
    return train, heldout[:num_heldout]


async def _map(games: textgame.Games, task: dict[str, Any]) -> tuple[str, ...]:
    """What is seen on the way to the coin that the game itself proposes."""
    seen = [(await games.view(task, ())).text]
    path = games.gold
    for turn in range(1, len(path) + 1):
        seen.append((await games.view(task, path[:turn])).text)
    return tuple(seen)


def conversations(tasks: Sequence[dict[str, Any]], careless: float, rng: random.Random) -> list[list[Message]]:
    """One a task: its episode, in which each turn is any of the listed actions with this chance."""

    async def episode(games: textgame.Games, task: dict[str, Any]) -> list[Message]:
        played: list[str] = []
        messages: list[Message] = []
        view = await games.view(task, ())
        while not view.done and len(played) < task["max_turns"]:
            messages.append({"role": "user", "content": f"{view.text}\nActions: {', '.join(view.actions)}"})
            played.append(_action(view, played, careless, rng))
            messages.append({"role": "assistant", "content": played[-1]})
            view = await games.view(task, played)
        return messages

    async def every(games: textgame.Games) -> list[list[Message]]:
        return [await episode(games, task) for task in tasks]

    return _played(every)


def _action(view: textgame.View, played: Sequence[str], careless: float, rng: random.Random) -> str:
    if rng.random() < careless:
        return rng.choice(view.actions)
    if "take coin" in view.actions:
        return "take coin"
    moves = [action for action in view.actions if action.startswith("move")]
    came = next((BACK[action] for action in reversed(played) if action in BACK), None)
    return rng.choice([move for move in moves if move != came] or moves)


def _played(play: Any) -> Any:
    games = textgame.Games()
    try:
        return asyncio.run(play(games))
    finally:
        games.close()
