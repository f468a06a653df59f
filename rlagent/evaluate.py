"""Evaluation: held-out tasks through the same rollout function, recorded and never trained on."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rlagent.client import RouterClient
from rlagent.config import EvalConfig
from rlagent.launch.rollout_pool import RolloutPool
from rlagent.rollout import Task, task_id
from rlagent.types import OPENED_BY_DRIVER, Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """success: share of tasks whose total reward reached the threshold; a rollout that failed did not.

    num_verifiers_failed counts components of rewards that took the value of a failure.
    """

    success: float
    reward: float
    num_tasks: int
    num_failed: int
    num_verifiers_failed: int = 0


async def evaluate(client: RouterClient, pool: RolloutPool, tasks: Sequence[Task], config: EvalConfig) -> Evaluation:
    """Run every task once at config.temperature (0 is greedy)."""

    async def one(index: int, task: Task) -> Reward | None:
        handle = await client.new_session(
            task_id=task_id(task, index),
            train=False,
            sampling={"temperature": config.temperature},
            metadata=OPENED_BY_DRIVER,
        )
        outcome = await pool.run(task, handle.to_json())
        await client.finish(handle.session_id, reward=outcome.reward, status=outcome.status)
        return outcome.reward

    found = await asyncio.gather(*(one(index, task) for index, task in enumerate(tasks)))
    rewards = [reward for reward in found if reward is not None]
    valid = [reward.total for reward in rewards]
    return Evaluation(
        success=sum(total >= config.success_threshold for total in valid) / len(tasks),
        reward=sum(valid) / len(tasks),
        num_tasks=len(tasks),
        num_failed=len(tasks) - len(valid),
        num_verifiers_failed=sum(len(reward.failed) for reward in rewards),
    )
