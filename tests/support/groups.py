"""Small groups of rollouts for tests of the algorithms."""

from collections.abc import Sequence

import numpy as np

from rlagent.types import Group, Reward, Rollout, Trajectory


def row(
    mask: Sequence[int], *, rollout_id: str = "r", reward: float = 0.0, first_id: int = 1, truncated: bool = False
) -> Trajectory:
    """A row with these mask bits; token ids count up, logprobs are -1 where sampled."""
    m = np.array(mask, dtype=np.bool_)
    n = len(m)
    return Trajectory(
        token_ids=np.arange(first_id, first_id + n, dtype=np.int32),
        loss_mask=m,
        logprobs=np.where(m, np.float32(-1), np.float32(0)),
        temperature=np.ones(n, dtype=np.float32),
        versions=np.where(m, 0, -1).astype(np.int32),
        turn=np.zeros(n, dtype=np.int32),
        call_ids=("c",),
        rollout_id=rollout_id,
        group_id="g",
        reward=reward,
        truncated=truncated,
    )


def group(
    rewards: Sequence[float],
    *,
    rows: Sequence[Sequence[Sequence[int]]] | None = None,
    name: str = "g",
    ungrouped: bool = False,
) -> Group:
    """A group with these rewards; `rows` gives each rollout's rows' masks (default one row of 2 prompt and 2 sampled tokens)."""
    masks = rows if rows is not None else [[[0, 0, 1, 1]]] * len(rewards)
    return Group(
        group_id=name,
        ungrouped=ungrouped,
        rollouts=tuple(
            Rollout(
                rollout_id=f"{name}-{i}",
                task_id="t",
                reward=Reward(components={"reward": reward}),
                rows=tuple(row(m, rollout_id=f"{name}-{i}", reward=reward) for m in masks[i]),
            )
            for i, reward in enumerate(rewards)
        ),
    )
