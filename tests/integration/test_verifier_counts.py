"""A verifier that fails is counted by the run: in its rollouts and in its evaluations, which go on as ever."""

import asyncio
from pathlib import Path

from router_harness import always, router, said

from rlagent.collect import Collector
from rlagent.config import EvalConfig, TaskDrawConfig
from rlagent.evaluate import evaluate
from rlagent.launch.rollout_pool import RolloutPool
from rlagent.task_draw import make_draw

ROLLOUT = """
import asyncio

from rlagent.envs.converse import converse
from rlagent.envs.verifiers import Check, Rubric, exact

async def hangs(attempt):
    await asyncio.Event().wait()

RUBRIC = Rubric([Check(name="right", verifier=exact()), Check(name="style", verifier=hangs, timeout_s=0.1)])

async def rollout(task, session):
    attempt = await converse(session, task, [{"role": "user", "content": "?"}])
    return await RUBRIC.reward(attempt)
"""


async def test_a_verifier_that_hangs_is_counted_and_its_rollouts_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "judged.py").write_text(ROLLOUT)
    tasks = [{"answer": "57"}, {"answer": "58"}]
    pool = RolloutPool(f"{tmp_path}/judged.py:rollout", workers=1, concurrency=4, timeout_s=60, logs=tmp_path)
    async with router(tmp_path, always(said("57"))) as harness, pool:
        found = await evaluate(harness.admin, pool, tasks, EvalConfig())
        assert (found.success, found.num_failed, found.num_verifiers_failed) == (0.5, 0, 2)
        failed: list[str] = []
        draw = make_draw(TaskDrawConfig(), tasks, seed=0, groups_per_step=1)
        collector = Collector(
            harness.admin, pool, tasks, group_size=2, groups_per_step=1, max_staleness=0, draw=draw, steps_left=1,
            deadline_s=60, failed=lambda session_id, _outcome: failed.append(session_id),
        )  # fmt: skip
        running = asyncio.create_task(collector.run())
        lease = await harness.admin.lease(num_groups=1, step=1, wait_s=60)
        running.cancel()
        await asyncio.wait({running})
    assert lease is not None
    assert [set(rollout.reward.components) for rollout in lease.groups[0].rollouts] == [{"right", "style"}] * 2
    assert collector.failures == {"verifier_timeout": 2}
    assert not failed
    assert "verifier style failed (timeout)" in (tmp_path / "rollout-0.log").read_text()
