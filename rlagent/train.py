"""The loop: lease, pack, step, publish, consume, checkpoint; evaluation beside it.

It knows neither algorithms (advantages arrive as per-token streams) nor placement (admission alone makes it synchronous
or asynchronous) nor who makes the rollouts (a function by path, or agents from outside).
Invariant: a checkpoint holds the weights, the number of the last consumption that made them, and the policy version that
served them; so a resume trains on every batch exactly once in the lineage of its weights.
"""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlagent.alarms import Alarms
from rlagent.client import RouterClient
from rlagent.collect import Collector
from rlagent.config import Config
from rlagent.display import Display
from rlagent.errors import ConfigError, RlagentError, Terminated
from rlagent.evaluate import evaluate
from rlagent.gather import gather
from rlagent.launch.local import LocalRanks, RankSpec, free_port
from rlagent.launch.rollout_pool import RolloutPool
from rlagent.launch.serve_child import serving
from rlagent.plot import plot_reward
from rlagent.rollout import Outcome, Task, read_tasks
from rlagent.run_directory import RunDirectory
from rlagent.task_draw import TaskDraw, make_draw
from rlagent.track import trackers
from rlagent.trainer.batch import pack
from rlagent.trainer.metrics import data_metrics
from rlagent.trainer.teacher import with_teacher
from rlagent.types import Batch, Lease

_LEASE_POLL_S: Final = 20.0  # one long poll for a batch; between polls the display says what is awaited


async def train(
    config: Config, *, resume: bool = False, router_url: str | None = None, rollout_only: bool = False,
    display: Display | None = None,
) -> RunDirectory:  # fmt: skip
    """Run the whole loop; the run's directory. Raises RlagentError for everything a user can mend.

    With `rollout_only` no learner is started: batches are collected and consumed, for a replay or a look at rewards.
    SIGTERM ends it after the step under way, with a checkpoint, by Terminated.
    """
    model_dir = config.model_dir
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path {str(model_dir)!r} is not a Hugging Face model directory (no config.json there)")
    if rollout_only and resume:
        raise ConfigError("--rollout-only leaves no checkpoint to resume from; leave --resume away")
    tasks = [] if config.rollout.tasks is None else read_tasks(config.rollout.tasks)
    held_out = [] if config.eval.tasks is None else read_tasks(config.eval.tasks)[: config.eval.num_tasks]
    draw = (
        make_draw(config.rollout.draw, tasks, seed=config.run.seed, groups_per_step=config.learner.batch.groups)
        if tasks else None
    )  # fmt: skip
    run = RunDirectory.reopen(config) if resume else RunDirectory.create(config)
    async with AsyncExitStack() as stack:
        terminated = stack.enter_context(_on_sigterm())
        display = stack.enter_context(display or Display())
        display.title(f"{run.path}: {model_dir.name}, {config.run.steps} steps")
        if router_url is not None and (others := set_for_serve(config)):
            display.say(
                f"{', '.join(others)}: of `rlagent serve`, which {router_url} has its own values of; not used here"
            )
        pool = None if config.rollout.function is None else await stack.enter_async_context(_rollout_pool(config, run))
        url = router_url if router_url is not None else await stack.enter_async_context(serving(config, run))
        client = await stack.enter_async_context(RouterClient(url, admin_key=config.router.admin_key))
        await client.health()
        ranks = None if rollout_only else await stack.enter_async_context(LocalRanks(rank_spec(config), run.logs))
        run.begin(config)
        loop = Loop(config, run, client, ranks, pool, held_out, display, terminated, draw)
        await loop.restore(resume=resume)
        await loop.run(tasks)
    return run


@dataclass(kw_only=True, slots=True)
class Position:
    """Where the loop stands: what a checkpoint stores beside the learner's own state."""

    step: int = 0  # learner steps done
    cursor: int = 0  # the last consumption trained on
    version: int = 0  # the policy version that holds these weights
    snapshot: str | None = None
    draw: dict[str, Any] = field(default_factory=dict)  # what is known of the tasks


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
        held_out: list[Task], display: Display, terminated: asyncio.Event,
        draw: TaskDraw | None,
    ) -> None:  # fmt: skip
        self._config = config
        self._run = run
        self._client = client
        self._ranks = ranks
        self._pool = pool
        self._held_out = held_out
        self._display = display
        self._terminated = terminated
        self._position = Position()
        self._alarms = Alarms(config.alarms, run.alarms, display.say, run.read_metrics())
        self._trackers = trackers(config.track, run.path)
        self._saving = False  # a checkpoint is being written beside the steps
        self._collector: Collector | None = None
        self._draw = draw
        self._failed_before = False
        self._verifier_failed_before = False

    async def restore(self, *, resume: bool) -> None:
        """Bring learner, buffer and engines to one state: the newest checkpoint's, or the model directory's."""
        self._display.state("loading")
        if resume:
            checkpoint = self._run.newest_checkpoint()
            if checkpoint is not None and self._ranks is not None:
                self._position = Position(**await self._ranks.call("load", checkpoint))
                if self._draw is not None:
                    self._draw.restore(self._position.draw)
            report = await self._client.restore(cursor=self._position.cursor, version=self._position.version)
            self._display.console.print(
                f"resumed after step {self._position.step}: {report.redelivered} batches are delivered again, "
                f"{report.interrupted} rollouts were interrupted", highlight=False,
            )  # fmt: skip
        current = await self._client.policy()
        if resume or current["version"] != 0:
            await self._publish(parent=current["version"], same_weights=resume)

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
            while self._position.step < steps and not self._terminated.is_set():
                await self._step()
            if collecting is not None:
                collecting.cancel()
            if self._position.step < steps:
                await self._save()
            await self._finish_save(wait=True)
        if self._position.step < steps:
            raise Terminated(
                f"the run was ended by SIGTERM after step {self._position.step} of {steps}; its checkpoint is saved, "
                "--resume goes on"
            )
        if self._ranks is not None:
            await self._ranks.call("save_hf", self._run.model)
        plot_reward(self._run.read_metrics(), self._run.reward_plot)

    async def _step(self) -> None:
        watch, start = Stopwatch(), time.perf_counter()
        with watch.stage("rollout"):
            gathered = await gather(
                self._lease, self._config.learner.batch.groups, refill=self._config.learner.batch.refill,
                dropped=self._make_room,
            )  # fmt: skip
        if gathered is None:
            return
        await self._finish_save(wait=False)
        packed = pack(gathered.groups, advantage=self._config.learner.advantage, loss=self._config.learner.loss,
                      max_row_tokens=self._config.learner.batch.max_row_tokens or self._context(),
                      version=self._position.version)  # fmt: skip
        metrics: dict[str, Any] = data_metrics(gathered.groups, packed.batch, lags=gathered.lags)
        self._display.state(f"step {self._position.step + 1}: training on {packed.batch.num_tokens} tokens")
        if packed.batch.num_sampled and self._ranks is not None:
            with watch.stage("train"):
                metrics |= await self._ranks.call("train_step", await self._taught(packed.batch))
        for lease in gathered.leases:
            self._position.cursor = await self._client.consume(lease.lease_id, step=self._position.step)
        self._position.step += 1
        if self._draw is not None:
            self._draw.observe(group for lease in gathered.leases for group in lease.groups)
            self._position.draw = self._draw.state()
        last = self._position.step == self._config.run.steps
        with watch.stage("sync"):
            await self._publish(parent=self._position.version)
        if self._collector is not None:
            self._collector.advance(self._config.run.steps - self._position.step)
        if last or self._position.step % self._config.checkpoint.every == 0:
            with watch.stage("checkpoint"):
                await self._save()
        if last or self._position.step % self._config.eval.every == 0:
            with watch.stage("eval"):
                metrics |= await self._evaluate()
        elapsed_s = time.perf_counter() - start
        metrics |= {f"time/{stage}_s": seconds for stage, seconds in watch.seconds.items()}
        metrics |= {
            "time/step_s": elapsed_s,
            "throughput/tokens_per_s": packed.batch.num_tokens / elapsed_s,
            "policy/version": self._position.version,
            **({"data/groups_left_out": gathered.num_flat} if self._config.learner.batch.refill else {}),
            **{f"data/dropped_{reason}": count for reason, count in packed.dropped.items()},
            **({} if self._collector is None else {f"rollout/{k}": n for k, n in self._collector.failures.items()}),
            **({} if self._draw is None or self._collector is None else self._draw.metrics(self._collector.next_index)),
        }
        self._run.write_metrics(self._position.step, metrics)
        self._say_failed_verifiers()
        self._display.stepped({"step": self._position.step, **metrics})
        for tracker in self._trackers:
            tracker(self._position.step, metrics)
        await self._alarms.show({"step": self._position.step, **metrics})

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
            self._display.state(f"step {self._position.step + 1}: waiting for {num_groups} groups")
            lease = await self._client.lease(num_groups=num_groups, step=self._position.step, wait_s=_LEASE_POLL_S)
            if lease is not None:
                if self._collector is not None:
                    self._collector.training(len(lease.groups))
                return lease
            await self._say_what_is_awaited()

    async def _say_what_is_awaited(self) -> None:
        """A wait that is longer than one poll is explained: agents that do not come, or engines that are down."""
        status, policy = await self._client.status(), await self._client.policy()
        engines = ", ".join(f"{engine['url']} {engine['state']}" for engine in policy["engines"])
        dropped = [f"{entry.count} {entry.reason}" for entry in status.ledger if entry.event == "rollout_dropped"]
        failed = [] if self._collector is None else [f"{n} {how}" for how, n in self._collector.failures.items()]
        said = [
            f"waiting for {self._config.learner.batch.groups} groups: {status.backlog} are complete, {len(status.incomplete)} under way",
            *([f"{status.waiting} finished sessions without a group, no full bundle yet"] if status.waiting else []),
            f"engines: {engines}",
            *([f"failed: {', '.join(failed)}"] if failed else []),
            *([f"rollouts left out: {', '.join(dropped)}"] if dropped else []),
        ]
        self._display.say("; ".join(said))

    async def _publish(self, *, parent: int, same_weights: bool = False) -> None:
        """Send the learner's weights to every engine as a new version; a full snapshot every K publishes."""
        if self._ranks is None:
            return
        ticket = await self._client.begin_publish(step=self._position.step, parent=parent, same_weights=same_weights)
        try:
            report = await self._ranks.call("publish", ticket.engines, ticket.version, ticket.until)
            due = ticket.version % self._config.sync.snapshot_every == 0
            snapshot = await self._write_snapshot(self._ranks, ticket.version) if due else None
            await self._client.commit_publish(ticket.publish_id, checksum=report.checksum, snapshot=snapshot)
        except RlagentError as error:
            await self._client.fail_publish(ticket.publish_id, str(error))
            raise
        self._position.version = ticket.version
        self._position.snapshot = snapshot or self._position.snapshot

    async def _write_snapshot(self, ranks: LocalRanks, version: int) -> str:
        directory = self._run.snapshot(version)
        await ranks.call("save_hf", directory)
        return str(directory.absolute())

    async def _save(self) -> None:
        if self._ranks is None:
            return
        checkpoint = self._run.checkpoint(self._position.step)
        if not checkpoint.exists():
            await self._finish_save(wait=True)
            position = {
                name: getattr(self._position, name) for name in ("step", "cursor", "version", "snapshot", "draw")
            }
            await self._ranks.call("save", checkpoint, position, not self._config.checkpoint.asynchronous)
            self._saving = self._config.checkpoint.asynchronous
        if not self._saving:
            self._prune()

    async def _finish_save(self, *, wait: bool) -> None:
        """Give the save that is being written its name, once it is on disk; only then may older ones go."""
        if self._saving and self._ranks is not None and await self._ranks.call("finish_save", wait) is not None:
            self._saving = False
            self._prune()

    def _prune(self) -> None:
        kept = set() if self._position.snapshot is None else {Path(self._position.snapshot)}
        self._run.prune(keep=self._config.checkpoint.keep, snapshots=kept)

    async def _evaluate(self) -> dict[str, float]:
        if self._pool is None or not self._held_out:
            return {}
        self._display.state(f"evaluating on {len(self._held_out)} held-out tasks")
        found = await evaluate(self._client, self._pool, self._held_out, self._config.eval)
        self._display.evaluated(self._position.step, found.success, found.reward, found.num_tasks)
        metrics = {"eval/success": found.success, "eval/reward": found.reward, "eval/failed": found.num_failed}
        if found.num_verifiers_failed:
            metrics["eval/verifiers_failed"] = found.num_verifiers_failed
        if self._position.step == 0:
            self._run.write_metrics(0, metrics)
        return metrics

    def _rollout_failed(self, session_id: str, outcome: Outcome) -> None:
        """The first failure is shown, all of them are kept."""
        self._run.write_failure(session_id, outcome.status, outcome.error)
        if not self._failed_before:
            self._failed_before = True
            last = (outcome.error.strip().splitlines() or ["no reason was given"])[-1]
            self._display.console.print(
                f"a rollout failed ({outcome.status}): {last}; it counts as failed, and this and later ones are in "
                f"{self._run.failures}", highlight=False, soft_wrap=True, markup=False,
            )  # fmt: skip

    def _say_failed_verifiers(self) -> None:
        """The first time only; metrics.jsonl goes on counting."""
        failures = {} if self._collector is None else self._collector.failures
        found = [f"{count} {name}" for name, count in failures.items() if name.startswith("verifier_")]
        if found and not self._verifier_failed_before:
            self._verifier_failed_before = True
            self._display.say(
                f"verifiers failed ({', '.join(found)}): their components took the value of a failure; rollout/verifier_* of "
                f"metrics.jsonl counts them, {self._run.logs}/rollout-*.log says why"
            )

    def _make_collector(self, pool: RolloutPool, tasks: list[Task], draw: TaskDraw) -> Collector:
        config = self._config
        return Collector(
            self._client, pool, tasks, group_size=config.rollout.group_size, groups_per_step=config.learner.batch.groups,
            max_staleness=config.buffer.max_staleness, draw=draw,
            steps_left=config.run.steps - self._position.step, deadline_s=config.buffer.group_deadline_s,
            failed=self._rollout_failed, greedy=config.learner.advantage.name == "remax",
        )  # fmt: skip

    def _context(self) -> int:
        return model_context(self._config.model_dir)


def set_for_serve(config: Config) -> list[str]:
    """Settings that were given but are only looked at by `rlagent serve`, which runs apart."""
    used = {"buffer.max_staleness", "buffer.group_deadline_s", "router.admin_key", "engine.dtype"}
    names = [
        f"{section}.{name}"
        for section in ("buffer", "router", "engine", "sampling")
        for name in sorted(getattr(config, section).model_fields_set)
    ]
    return [name for name in names if name not in used]


@contextmanager
def _on_sigterm() -> Iterator[asyncio.Event]:
    """Set by the signal that schedulers send before they kill."""
    terminated = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    try:
        yield terminated
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def model_context(model_dir: Path) -> int:
    """Longest row the model can take, in tokens (max_position_embeddings of its config.json)."""

    return int(json.loads((model_dir / "config.json").read_text())["max_position_embeddings"])


def _rollout_pool(config: Config, run: RunDirectory) -> RolloutPool:
    rollout = config.rollout
    assert rollout.function is not None
    return RolloutPool(
        rollout.function,
        workers=rollout.workers,
        concurrency=rollout.concurrency,
        timeout_s=rollout.timeout_s,
        logs=run.logs,
    )


def rank_spec(config: Config) -> RankSpec:
    """What the learner's ranks of a run are built from."""
    return RankSpec(
        learner=config.learner, parallel=config.parallel, sync=config.sync, model_dir=config.model_dir,
        engine_dtype=config.engine.dtype, master_port=free_port(), seed=config.run.seed, total_steps=config.run.steps,
    )  # fmt: skip
