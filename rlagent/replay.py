"""Recorded batches, trained on again without engines: `rlagent train --replay RUN`, and single batches as a file: `rlagent dump`.

In the flow it stands beside train.py: the groups come from the buffer of a run that was trained before, in the lineage of its
newest weights. Invariant: the recorded run is only read; under its own settings the replay's steps are its steps, bit for bit.
"""

import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import safetensors.numpy

from rlagent.buffer import Buffer
from rlagent.buffer.history import Consumption
from rlagent.config import Config
from rlagent.display import Display
from rlagent.errors import LoadError
from rlagent.gather import useful
from rlagent.launch.local import LocalRanks
from rlagent.model_directory import model_context
from rlagent.recorded import recorded_buffer, recorded_config
from rlagent.run_directory import RunDirectory
from rlagent.train import rank_spec
from rlagent.trainer.batch import pack
from rlagent.trainer.metrics import data_metrics
from rlagent.trainer.teacher import with_teacher
from rlagent.types import Batch, Group

# Metrics that a step computes from its batch and its weights alone.
_EXACT: Final = ("policy/", "mismatch/")
_OF_THE_LOOP: Final = ("policy/version",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How far a replay was the recorded run."""

    num_steps: int
    num_equal: int  # steps from the first on whose metrics are those recorded, bit for bit


async def replay(config: Config, recorded: Path) -> Replayed:
    """Train on the recorded batches in order, from the model directory on; writes metrics and the model to config.run.dir."""
    before = {record["step"]: record for record in RunDirectory(recorded).read_metrics()}
    run = RunDirectory.create(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(run.starting())
        buffer = await stack.enter_async_context(recorded_buffer(recorded))
        history = by_step(await buffer.lineage())
        if not history:
            raise LoadError(f"{str(recorded)!r} was not trained: its data buffer knows no consumption")
        ranks = await stack.enter_async_context(LocalRanks(rank_spec(config), run.logs))
        run.begin(config)
        equal = 0
        with Display() as display:
            display.title(f"{run.path}: replay of {len(history)} steps of {recorded}")
            for step, consumptions in enumerate(history[: config.run.steps], 1):
                start = time.perf_counter()
                groups = await _groups(buffer, consumptions, config)
                batch = _pack(config, groups)
                if config.learner.loss.name == "opd" and batch.num_sampled:
                    batch = await with_teacher(batch, config.learner.teacher)
                metrics: dict[str, Any] = dict(data_metrics(groups, batch))
                if batch.num_sampled:
                    metrics |= await ranks.call("train_step", batch)
                same = _same(metrics, before.get(step, {}))
                equal += same and equal == step - 1
                elapsed_s = time.perf_counter() - start
                metrics |= {
                    "replay/equal": float(same),
                    "time/step_s": elapsed_s,
                    "time/train_s": elapsed_s,
                    "throughput/tokens_per_s": batch.num_tokens / elapsed_s,
                }
                run.write_metrics(step, metrics)
                display.stepped({"step": step, **metrics})
        await ranks.call("save_hf", run.model)
    return Replayed(num_steps=min(len(history), config.run.steps), num_equal=equal)


def by_step(lineage: list[Consumption]) -> list[list[Consumption]]:
    """What each learner step consumed, in order: one batch, or with dynamic sampling as many as it took to fill the step."""
    return [list(of_step) for _, of_step in itertools.groupby(lineage, key=lambda consumption: consumption.step)]


async def _groups(buffer: Buffer, consumptions: list[Consumption], config: Config) -> list[Group]:
    """The groups that a step trains on."""
    leased = [group for each in consumptions for group in await buffer.consumed(each.batch)]
    return useful(leased, refill=config.learner.batch.refill)


def _pack(config: Config, groups: list[Group]) -> Batch:
    learner = config.learner
    longest = learner.batch.max_row_tokens or model_context(config.model_dir)
    return pack(groups, advantage=learner.advantage, loss=learner.loss, max_row_tokens=longest).batch


def _same(metrics: dict[str, Any], record: dict[str, Any]) -> bool:
    names = {name for name in (*metrics, *record) if name.startswith(_EXACT) and name not in _OF_THE_LOOP}
    return bool(names) and all(metrics.get(name) == record.get(name) for name in names)


async def dump(recorded: Path, step: int, out: Path) -> Batch:
    """Write the batch of a step (1 is the first), as the learner was given it, to a safetensors file.

    Its header names rollouts, tasks and rewards. LoadError for a step that was not trained.
    """
    config = recorded_config(recorded)
    async with recorded_buffer(recorded) as buffer:
        consumptions = _of_step(by_step(await buffer.lineage()), step, recorded)
        groups = await _groups(buffer, consumptions, config)
    batch = _pack(config, groups)
    arrays = {
        field.name: value for field in fields(batch) if isinstance(value := getattr(batch, field.name), np.ndarray)
    }
    rollouts = [
        {"group_id": group.group_id, "rollout_id": rollout.rollout_id, "task_id": rollout.task_id,
         "reward": rollout.reward.total, "components": dict(rollout.reward.components)}
        for group in groups for rollout in group.rollouts
    ]  # fmt: skip
    batches = " ".join(str(each.batch) for each in consumptions)
    header = {"step": str(step), "batch": batches, "rollouts": orjson.dumps(rollouts).decode()}
    safetensors.numpy.save_file(arrays, out, metadata=header)
    return batch


def _of_step(history: list[list[Consumption]], step: int, recorded: Path) -> list[Consumption]:
    if not 1 <= step <= len(history):
        raise LoadError(f"step {step} of {str(recorded)!r} was not trained; it has steps 1 to {len(history)}")
    return history[step - 1]
