"""TextWorld-Express (extra `envs`, and Java): text games that are seen and played in words, a turn an action.

    python -m rlagent.envs.textgame coin --num 200 --params numLocations=2,numDistractorItems=0,includeDoors=0 > tasks.jsonl
    rlagent train --rollout-function-path rlagent.envs.textgame:rollout --tasks tasks.jsonl ...

Invariant: an episode is its seed and its actions. One game process a worker serves all episodes: where another one was played in
between, the actions are played again (a step takes a millisecond), and the same actions show the same game.
"""

import argparse
import asyncio
import functools
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlagent.ending import plain_errors
from rlagent.envs.converse import converse
from rlagent.envs.verifiers.attempt import Endpoint, Message, text_of
from rlagent.errors import ConfigError
from rlagent.types import Reward

_MAX_ACTIONS: Final = 50
FOLDS: Final = ("train", "dev", "test")
GAMES: Final = ("cookingworld", "twc", "coin", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the player sees after some actions. score is 0 to 1, and below 0 only for what ends a game badly."""

    text: str
    actions: tuple[str, ...]
    score: float
    done: bool


class Games:
    """The one game process of this worker. ConfigError when Java is missing."""

    def __init__(self) -> None:
        if shutil.which("java") is None:
            raise ConfigError("TextWorld-Express needs Java: apt-get install default-jre-headless")
        from textworld_express import TextWorldExpressEnv

        self._env = TextWorldExpressEnv(envStepLimit=_MAX_ACTIONS + 1)
        self._lock = asyncio.Lock()
        self._at: tuple[str, tuple[str, ...]] | None = None  # the episode and the actions that it stands after
        self._loaded: tuple[str, str] | None = None
        self.gold: tuple[str, ...] = ()  # of the episode that was begun last

    async def view(self, task: Mapping[str, Any], actions: Sequence[str]) -> View:
        """The game of a task after these actions."""
        async with self._lock:
            return await asyncio.to_thread(self._view, task, tuple(actions))

    def _view(self, task: Mapping[str, Any], actions: tuple[str, ...]) -> View:
        episode = json.dumps([task["game"], task["params"], task["fold"], task["seed"]])
        if self._at is not None and actions and self._at == (episode, actions[:-1]):
            news = actions[-1:]
        else:
            game = (task["game"], task["params"])
            if self._loaded != game:
                self._env.load(gameName=game[0], gameParams=game[1])
                self._loaded = game
            text, facts = self._env.reset(seed=task["seed"], gameFold=task["fold"], generateGoldPath=True)
            self.gold = tuple(self._env.getGoldActionSequence())
            text, news = f"{facts['taskDescription']}\n{text}", actions
        for action in news:
            text, _, _, facts = self._env.step(action)
        self._at = (episode, actions)
        done = bool(facts["tasksuccess"] or facts["taskfailure"])
        return View(
            text=text.strip(), actions=tuple(sorted(facts["validActions"])), score=float(facts["score"]), done=done
        )

    def close(self) -> None:
        """End the process."""
        self._env.close()
        self._env._gateway.java_process.communicate()


@functools.cache
def _games() -> Games:
    return Games()


async def play(games: Games, task: Mapping[str, Any], session: Endpoint) -> Reward:
    """One episode: {"score": the game's, between -1 and 1}."""
    played: list[str] = []
    now = await games.view(task, ())

    def shown(view: View) -> Message:
        listed = f"\nActions: {', '.join(view.actions)}" if task.get("show_actions", True) else ""
        return {"role": "user", "content": view.text + listed}

    async def reply(message: Message) -> Sequence[Message]:
        nonlocal now
        played.append(" ".join(text_of(message).split()))
        now = await games.view(task, played)
        return [] if now.done else [shown(now)]

    turns = min(int(task.get("max_turns", 20)), _MAX_ACTIONS)
    await converse(session, task, [shown(now)], reply=reply, max_turns=turns)
    return Reward(components={"score": max(-1.0, min(1.0, now.score))})


async def rollout(task: Mapping[str, Any], session: Endpoint) -> Reward:
    """Play one task with the worker's game process."""
    return await play(_games(), task, session)


def tasks(
    game: str, num: int, *, params: str = "", fold: str = "train", seed: int = 0, **more: Any
) -> list[dict[str, Any]]:
    """So many episodes. Folds share no episode: the package keeps them apart by seed. ConfigError for an unknown game or fold."""
    if game not in GAMES:
        raise ConfigError(f"game is {game!r}; use one of {', '.join(GAMES)}")
    if fold not in FOLDS:
        raise ConfigError(f"fold is {fold!r}; use one of {', '.join(FOLDS)}")
    return [
        {"id": f"{game}-{fold}-{at}", "game": game, "params": params, "fold": fold, "seed": at, **more}
        for at in range(seed, seed + num)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Write tasks as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m rlagent.envs.textgame", description=main.__doc__)
    parser.add_argument("game", help=", ".join(GAMES))
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", default="", help="the game's own, e.g. numLocations=2,includeDoors=0")
    parser.add_argument("--fold", choices=FOLDS, default="train")
    parser.add_argument("--max-turns", type=int, default=20)
    given = parser.parse_args(argv)
    made = tasks(
        given.game, given.num, params=given.params, fold=given.fold, seed=given.seed, max_turns=given.max_turns
    )
    for task in made:
        sys.stdout.write(json.dumps(task) + "\n")


if __name__ == "__main__":
    with plain_errors():
        main()
