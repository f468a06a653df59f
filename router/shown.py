"""Sessions, calls and rows as their JSON answers show them. Arrays are lists; a key's hash is never shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import orjson

from rlagent.trajectory import full_prompt_ids
from rlagent.types import Call, Session, Trajectory


def session_json(session: Session) -> dict[str, object]:
    """A session without its key's hash."""
    body = {
        name: getattr(session, name)
        for name in (
            "session_id", "task_id", "group_id", "group_size", "train", "created_at", "deadline_at", "expires_at",
            "state", "status", "sealed_at",
        )
    }  # fmt: skip
    body |= {"sampling": dict(session.sampling), "metadata": dict(session.metadata)}
    reward = session.reward
    return {
        **body,
        "reward": None
        if reward is None
        else {"total": reward.total, "components": dict(reward.components), "calls": dict(reward.calls)},
    }


def call_json(call: Call, by_id: Mapping[str, Call]) -> dict[str, object]:
    """A call with its arrays as lists."""
    return {
        "call_id": call.call_id,
        "index": call.index,
        "dialect": call.dialect,
        "model": call.model,
        "parent": None if call.parent is None else asdict(call.parent),
        "origin": call.origin,
        "reason": call.reason,
        "prompt_ids": full_prompt_ids(call.call_id, by_id).tolist(),
        "messages": orjson.loads(call.messages),
        "served": orjson.loads(call.served),
        "sampling": asdict(call.sampling),
        "delivery": call.delivery,
        "started_at": call.started_at,
        "finished_at": call.finished_at,
        "client": orjson.loads(call.client),
        "images": [asdict(image) for image in call.images],
        "num_prompt_tokens": call.num_prompt_tokens,
        "choices": [
            {
                "output_ids": choice.output_ids.tolist(),
                "logprobs": choice.logprobs.tolist(),
                "versions": [asdict(span) for span in choice.versions],
                "finish_reason": choice.finish_reason,
                "matched_stop": choice.matched_stop,
                "parse_status": choice.parse_status,
                "trainable": choice.trainable,
            }
            for choice in call.choices
        ],
    }


def trajectory_json(row: Trajectory) -> dict[str, object]:
    """A row: token_ids, loss_mask, logprobs and versions are one each per token."""
    return {
        "token_ids": row.token_ids.tolist(),
        "loss_mask": row.loss_mask.astype(int).tolist(),
        "logprobs": row.logprobs.tolist(),
        "temperature": row.temperature.tolist(),
        "versions": row.versions.tolist(),
        "turn": row.turn.tolist(),
        "call_ids": list(row.call_ids),
        "reward": row.reward,
        "rollout_id": row.rollout_id,
        "group_id": row.group_id,
        "truncated": row.truncated,
    }
