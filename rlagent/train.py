"""A whole run: check the settings, start what it needs (workers, router, learner ranks), and run the loop until its end.

`rlagent train` calls `train`; the loop itself is loop.py. Everything that is started here is ended here, in the reverse order.
Invariant: what a setting alone can get wrong is found before anything is started, and then nothing is left behind.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from rlagent.client import RouterClient
from rlagent.config import Config
from rlagent.display import Display
from rlagent.errors import ConfigError
from rlagent.launch.local import LocalRanks, RankSpec, free_port
from rlagent.launch.rollout_pool import RolloutPool
from rlagent.launch.serve_child import serving
from rlagent.loading import load_function
from rlagent.loop import Loop
from rlagent.model_directory import read_model
from rlagent.rollout import read_tasks
from rlagent.run_directory import RunDirectory
from rlagent.task_draw import make_draw


async def train(
    config: Config, *, resume: bool = False, router_url: str | None = None, rollout_only: bool = False,
    display: Display | None = None,
) -> RunDirectory:  # fmt: skip
    """Run the whole loop; the run's directory. Raises RlagentError for everything a user can mend.

    With `rollout_only` no learner is started: batches are collected and consumed, for a replay or a look at rewards.
    SIGTERM ends it after the step under way, with a checkpoint, by Terminated.
    """
    read_model(config.model_dir)
    if ":" in config.learner.advantage.name:
        load_function(config.learner.advantage.name, what="learner.advantage.name")
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
        stack.enter_context(run.starting())
        terminated = stack.enter_context(_on_sigterm())
        display = stack.enter_context(display or Display())
        display.title(f"{run.path}: {config.model_dir.name}, {config.run.steps} steps")
        # A resume reads all settings of its run, and cannot tell which of them were given.
        if router_url is not None and not resume and (others := set_for_serve(config)):
            display.say(
                f"{', '.join(others)}: of `rlagent serve`, which {router_url} has its own values of; not used here"
            )
        pool = None if config.rollout.function is None else await stack.enter_async_context(_rollout_pool(config, run))
        url = router_url if router_url is not None else await stack.enter_async_context(serving(config, run))
        client = await stack.enter_async_context(RouterClient(url, admin_key=config.router.admin_key))
        await client.health()
        if pool is None:
            display.say(f"no rollout function: agents from outside make the rollouts, with OPENAI_BASE_URL={url}/v1")
        ranks = None if rollout_only else await stack.enter_async_context(LocalRanks(rank_spec(config), run.logs))
        run.begin(config)
        loop = Loop(config, run, client, ranks, pool, held_out, display, terminated, draw)
        await loop.restore(resume=resume)
        await loop.run(tasks)
    return run


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
