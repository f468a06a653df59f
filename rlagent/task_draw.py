"""Which task a group of rollouts gets: uniformly, from easy to hard, or where there is most to learn.

In the flow: the collector asks for the task of each new group; the loop tells of the rollouts of every step, and stores the state in
the checkpoint. Invariant: a draw depends on the seed, the group's number and the state alone, so that a resume draws what the run
would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from rlagent.config import TaskDrawConfig
from rlagent.errors import LoadError
from rlagent.rollout import Task, task_id
from rlagent.types import Float64Array, Group, Int64Array

# Outcomes that a task is given before its first: half of them successes, so that what was never tried counts as most worth it.
_PRIOR: Final = 2.0


class TaskDraw(Protocol):
    """The task of each group."""

    def place(self, index: int, known_id: str | None = None) -> int:
        """Which task the index-th group is of; `known_id` is the id of its task if the group exists already."""

    def observe(self, groups: Iterable[Group]) -> None:
        """These groups are trained on."""

    def metrics(self, index: int) -> dict[str, float]:
        """What the next draw, of the index-th group, is made from."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` gave."""


def make_draw(config: TaskDrawConfig, tasks: Sequence[Task], *, seed: int, groups_per_step: int) -> TaskDraw:
    """The draw that is set. Raises LoadError for tasks that it cannot draw from."""
    if config.by == "curriculum":
        return Curriculum(_difficulties(tasks, config.difficulty), config, seed=seed, groups_per_step=groups_per_step)
    if config.by == "prioritised":
        return Prioritised([task_id(task, place) for place, task in enumerate(tasks)], config, seed=seed)
    return Uniform(len(tasks), seed=seed)


class _Stateless:
    """A draw by the group's number alone."""

    def observe(self, groups: Iterable[Group]) -> None:
        """Nothing is learned from outcomes."""

    def state(self) -> dict[str, Any]:
        """None."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """None; that of a run with other settings is of no use."""


class Uniform(_Stateless):
    """Every epoch is a permutation of its own."""

    def __init__(self, num_tasks: int, *, seed: int) -> None:
        self._num_tasks, self._seed = num_tasks, seed

    def place(self, index: int, known_id: str | None = None) -> int:
        """As TaskDraw."""
        del known_id
        epoch, place = divmod(index, self._num_tasks)
        return int(np.random.default_rng([self._seed, epoch]).permutation(self._num_tasks)[place])

    def metrics(self, index: int) -> dict[str, float]:
        """Epochs begun."""
        return {"tasks/epoch": float(index // self._num_tasks)}


class Curriculum(_Stateless):
    """Uniformly from the easiest tasks, a share that grows linearly to all of them (the linear pacing of arXiv 1904.03626, sec. 3)."""

    def __init__(self, difficulty: Float64Array, config: TaskDrawConfig, *, seed: int, groups_per_step: int) -> None:
        self._difficulty = difficulty
        self._order: Int64Array = np.argsort(difficulty, kind="stable")
        self._config, self._seed = config, seed
        self._groups = config.steps * groups_per_step

    def open(self, index: int) -> int:
        """How many tasks, the easiest, the index-th group is drawn from."""
        share = self._config.start + (1 - self._config.start) * min(1.0, index / self._groups)
        return max(1, math.ceil(share * len(self._order)))

    def place(self, index: int, known_id: str | None = None) -> int:
        """As TaskDraw."""
        del known_id
        return int(self._order[np.random.default_rng([self._seed, index]).integers(self.open(index))])

    def metrics(self, index: int) -> dict[str, float]:
        """Tasks that are drawn from, and the hardest of them."""
        number = self.open(index)
        return {"tasks/open": float(number), "tasks/hardest": float(self._difficulty[self._order[number - 1]])}


class Prioritised:
    """By p (1 - p), the variance of success: the learnability of arXiv 2408.15099, and of 2502.12272 for language models.

    p is a running mean over a task's rollouts. What always or never succeeds is drawn by the uniform share alone.
    """

    def __init__(self, ids: Sequence[str], config: TaskDrawConfig, *, seed: int) -> None:
        self._places = {name: place for place, name in enumerate(ids)}
        if len(self._places) < len(ids):
            twice = next(name for place, name in enumerate(ids) if self._places[name] != place)
            raise LoadError(
                f"two tasks have the id {twice!r}; rollout.draw.by = 'prioritised' tells tasks by their ids: make them unique"
            )
        self._config, self._seed = config, seed
        self._successes = np.zeros(len(ids))
        self._rollouts = np.zeros(len(ids))

    def success(self) -> Float64Array:
        """The running success of each task."""
        mean: Float64Array = (self._successes + _PRIOR / 2) / (self._rollouts + _PRIOR)
        return mean

    def probabilities(self) -> Float64Array:
        """Of each task, to be drawn next."""
        p = self.success()
        weight, share = p * (1 - p), self._config.uniform_share
        found: Float64Array = (1 - share) * weight / weight.sum() + share / len(p)
        return found

    def place(self, index: int, known_id: str | None = None) -> int:
        """As TaskDraw; a group that exists keeps its task."""
        if known_id in self._places:
            return self._places[known_id]
        return int(np.random.default_rng([self._seed, index]).choice(len(self._places), p=self.probabilities()))

    def observe(self, groups: Iterable[Group]) -> None:
        """Count the rollouts' successes; of a task's earlier ones a part is forgotten."""
        for group in groups:
            place = self._places.get(group.rollouts[0].task_id or "") if group.rollouts else None
            if place is None or group.ungrouped:
                continue
            won = sum(rollout.reward.total >= self._config.success for rollout in group.rollouts)
            self._successes[place] = self._config.memory * self._successes[place] + won
            self._rollouts[place] = self._config.memory * self._rollouts[place] + len(group.rollouts)

    def metrics(self, index: int) -> dict[str, float]:
        """How far the draws are from uniform, and what is known of the tasks."""
        del index
        drawn, seen = self.probabilities(), self._rollouts > 0
        return {
            "tasks/effective": float(
                np.exp(-(drawn * np.log(drawn)).sum())
            ),  # as many drawn evenly have the same entropy
            "tasks/seen": float(seen.sum()),
            "tasks/success": float(self.success()[seen].mean()) if seen.any() else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Both sums of each task that was seen, by its id."""
        sums = zip(self._successes.tolist(), self._rollouts.tolist(), strict=True)
        return {name: list(pair) for name, pair in zip(self._places, sums, strict=True) if pair[1]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """As TaskDraw; tasks that are not in the file any more are forgotten."""
        self._successes[:] = self._rollouts[:] = 0
        for name, (successes, rollouts) in state.items():
            if name in self._places:
                self._successes[self._places[name]], self._rollouts[self._places[name]] = successes, rollouts


def _difficulties(tasks: Sequence[Task], field: str) -> Float64Array:
    for place, task in enumerate(tasks):
        value = task.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise LoadError(
                f"task {task_id(task, place)!r} has {field} = {value!r}; rollout.draw.by = 'curriculum' needs a number there: give "
                "each task one, or name another field with rollout.draw.difficulty"
            )
    return np.array([float(task[field]) for task in tasks])
