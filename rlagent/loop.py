"""The loop over learner steps: lease, pack, step, consume, publish, checkpoint; evaluation beside it.

It knows neither algorithms (advantages arrive as per-token streams) nor placement (admission alone makes it synchronous
or asynchronous) nor who makes the rollouts (a function by path, or agents from outside). train.py builds what it works with.
Invariant: a step consumes exactly the leases that it trained on, before its weights are published or saved.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rlagent.alarms import Alarms
from rlagent.client import RouterClient
from rlagent.collect import Collector
from rlagent.config import Config
from rlagent.display import Display
from rlagent.errors import Terminated
from rlagent.evaluate import evaluate
from rlagent.gather import Gathered, gather
from rlagent.launch.local import LocalRanks
from rlagent.launch.rollout_pool import RolloutPool
from rlagent.lineage import Lineage
from rlagent.model_directory import model_context
from rlagent.plot import plot_reward
from rlagent.rollout import Task
from rlagent.run_directory import RunDirectory
from rlagent.task_draw import TaskDraw
from rlagent.told import Told
from rlagent.track import trackers
from rlagent.trainer.batch import PackResult, pack
from rlagent.trainer.metrics import data_metrics
from rlagent.trainer.teacher import with_teacher
from rlagent.types import Batch, Lease

_LEASE_POLL_S: Final = 20.0  # one long poll for a batch; between polls it is told what is awaited


@dataclass(slots=True)
class Stopwatch:
    """Seconds of each stage of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to stage `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Loop:
    """One run's loop over learner steps."""

    def __init__(
        self, config: Config, run: RunDirectory, client: RouterClient, ranks: LocalRanks | None, pool: RolloutPool | None,
        held_out: list[Task], display: Display, terminated: asyncio.Event, draw: TaskDraw | None,
    ) -> None:  # fmt: skip
        self._config = config
        self._run = run
        self._client = client
        self._ranks = ranks
        self._pool = pool
        self._held_out = held_out
        self._display = display
        self._terminated = terminated
        self._lineage = Lineage(config, run, client, ranks)
        self._told = Told(display, run)
        self._alarms = Alarms(config.alarms, run.alarms, display.say, run.read_metrics())
        self._trackers = trackers(config.track, run.path)
        self._collector: Collector | None = None
        self._draw = draw

    async def restore(self, *, resume: bool) -> None:
        """Bring learner, buffer and engines to one state: the newest checkpoint's, or the model directory's."""
        self._display.state("loading")
        if resume:
            report = await self._lineage.restore()
            if self._draw is not None:
                self._draw.restore(self._lineage.position.draw)
            self._display.say(
                f"resumed after step {self._step}: {report.redelivered} batches are delivered again, "
                f"{report.interrupted} rollouts were interrupted"
            )
        current = await self._client.policy()
        if resume or current["version"] != 0:
            await self._lineage.publish(parent=current["version"], same_weights=resume)

    async def run(self, tasks: list[Task]) -> None:
        """All remaining steps, then the last evaluation, checkpoint, plot and model."""
        steps = self._config.run.steps
        async with asyncio.TaskGroup() as beside:
            await self._evaluate()
            collecting = None
            if self._pool is not None:
                assert self._draw is not None, "a rollout function has tasks"
                self._collector = self._make_collector(self._pool, tasks, self._draw)
                collecting = beside.create_task(self._collector.run())
            while self._step < steps and not self._terminated.is_set():
                await self._take_step()
            if collecting is not None:
                collecting.cancel()
            if self._step < steps:
                await self._lineage.save()
            await self._lineage.finish_save(wait=True)
        if self._step < steps:
            saved = "" if self._ranks is None else "; its checkpoint is saved, --resume goes on"
            raise Terminated(f"the run was ended by SIGTERM after step {self._step} of {steps}{saved}")
        if self._ranks is not None:
            await self._ranks.call("save_hf", self._run.model)
        plot_reward(self._run.read_metrics(), self._run.reward_plot)

    @property
    def _step(self) -> int:
        """Learner steps done."""
        return self._lineage.position.step

    @property
    def _failures(self) -> Mapping[str, int]:
        return {} if self._collector is None else self._collector.failures

    async def _take_step(self) -> None:
        """One learner step, from waiting for its batch to its line of metrics; nothing when the run is to end first."""
        watch, start = Stopwatch(), time.perf_counter()
        with watch.stage("rollout"):
            gathered = await gather(
                self._lease, self._config.learner.batch.groups, refill=self._config.learner.batch.refill,
                dropped=self._make_room,
            )  # fmt: skip
        if gathered is None:
            return
        await self._lineage.finish_save(wait=False)
        packed = self._packed(gathered)
        metrics: dict[str, Any] = data_metrics(gathered.groups, packed.batch, lags=gathered.lags)
        self._display.state(f"step {self._step + 1}: training on {packed.batch.num_tokens} tokens")
        if packed.batch.num_sampled and self._ranks is not None:
            await self._lineage.make_room()
            with watch.stage("train"):
                metrics |= await self._ranks.call("train_step", await self._taught(packed.batch))
        await self._consume(gathered)
        metrics |= await self._hand_on(watch)
        elapsed_s = time.perf_counter() - start
        metrics |= {f"time/{stage}_s": seconds for stage, seconds in watch.seconds.items()}
        metrics |= {
            "time/step_s": elapsed_s,
            "throughput/tokens_per_s": packed.batch.num_tokens / elapsed_s,
            "policy/version": self._lineage.position.version,
            **({"data/groups_left_out": gathered.num_flat} if self._config.learner.batch.refill else {}),
            **{f"data/dropped_{reason}": count for reason, count in packed.dropped.items()},
            **{f"rollout/{reason}": count for reason, count in self._failures.items()},
            **({} if self._draw is None or self._collector is None else self._draw.metrics(self._collector.next_index)),
        }
        await self._show(metrics)

    def _packed(self, gathered: Gathered) -> PackResult:
        learner = self._config.learner
        return pack(
            gathered.groups, advantage=learner.advantage, loss=learner.loss, version=self._lineage.position.version,
            max_row_tokens=learner.batch.max_row_tokens or model_context(self._config.model_dir),
        )  # fmt: skip

    async def _consume(self, gathered: Gathered) -> None:
        position = self._lineage.position
        for lease in gathered.leases:
            position.cursor = await self._client.consume(lease.lease_id, step=position.step)
        position.step += 1
        if self._draw is not None:
            self._draw.observe(group for lease in gathered.leases for group in lease.groups)
            position.draw = self._draw.state()

    async def _hand_on(self, watch: Stopwatch) -> dict[str, float]:
        """Publish the step's weights; save and evaluate them when that is due. The evaluation's metrics."""
        steps = self._config.run.steps
        with watch.stage("sync"):
            await self._lineage.publish(parent=self._lineage.position.version)
        if self._collector is not None:
            self._collector.advance(steps - self._step)
        if self._step == steps or self._step % self._config.checkpoint.every == 0:
            with watch.stage("checkpoint"):
                await self._lineage.save()
        if self._step == steps or self._step % self._config.eval.every == 0:
            with watch.stage("eval"):
                return await self._evaluate()
        return {}

    async def _show(self, metrics: dict[str, Any]) -> None:
        """A step's metrics, to all who want them; an alarm may stop the run."""
        self._run.write_metrics(self._step, metrics)
        self._told.verifiers_failed(self._failures)
        self._display.stepped({"step": self._step, **metrics})
        for tracker in self._trackers:
            tracker(self._step, metrics)
        await self._alarms.show({"step": self._step, **metrics})

    async def _taught(self, batch: Batch) -> Batch:
        """The batch with its teacher's logprobs, where it is distilled from one."""
        learner = self._config.learner
        return await with_teacher(batch, learner.teacher) if learner.loss.name == "opd" else batch

    def _make_room(self, num_groups: int) -> None:
        if self._collector is not None:
            self._collector.replace(num_groups)

    async def _lease(self, num_groups: int) -> Lease | None:
        """A batch of so many groups, however long it takes; None when the run is to end first."""
        terminated = asyncio.create_task(self._terminated.wait())
        leasing = asyncio.create_task(self._lease_batch(num_groups))
        try:
            await asyncio.wait({leasing, terminated}, return_when=asyncio.FIRST_COMPLETED)
            return leasing.result() if leasing.done() else None  # one that is granted still is offered again
        finally:
            for task in (leasing, terminated):
                task.cancel()
            await asyncio.wait({leasing, terminated})

    async def _lease_batch(self, num_groups: int) -> Lease:
        while True:
            self._display.state(f"step {self._step + 1}: waiting for {num_groups} groups")
            lease = await self._client.lease(num_groups=num_groups, step=self._step, wait_s=_LEASE_POLL_S)
            if lease is not None:
                if self._collector is not None:
                    self._collector.training(len(lease.groups))
                return lease
            status, policy = await self._client.status(), await self._client.policy()
            self._told.awaited(self._config.learner.batch.groups, status, policy, self._failures)

    async def _evaluate(self) -> dict[str, float]:
        if self._pool is None or not self._held_out:
            return {}
        self._display.state(f"evaluating on {len(self._held_out)} held-out tasks")
        found = await evaluate(self._client, self._pool, self._held_out, self._config.eval)
        self._display.evaluated(self._step, found.success, found.reward, found.num_tasks)
        metrics = {"eval/success": found.success, "eval/reward": found.reward, "eval/failed": found.num_failed}
        if found.num_verifiers_failed:
            metrics["eval/verifiers_failed"] = found.num_verifiers_failed
        if self._step == 0:
            self._run.write_metrics(0, metrics)
        return metrics

    def _make_collector(self, pool: RolloutPool, tasks: list[Task], draw: TaskDraw) -> Collector:
        config = self._config
        return Collector(
            self._client, pool, tasks, group_size=config.rollout.group_size, groups_per_step=config.learner.batch.groups,
            max_staleness=config.buffer.max_staleness, draw=draw,
            steps_left=config.run.steps - self._step, deadline_s=config.buffer.group_deadline_s,
            failed=self._told.rollout_failed, greedy=config.learner.advantage.name == "remax",
        )  # fmt: skip
