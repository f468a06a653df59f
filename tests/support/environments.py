"""An environment's rollout function, as `rlagent train` would run it: in a worker process, through a router, on a scripted engine."""

import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_engine import Reply
from router_harness import MODEL, TOKENIZER, Harness, router, said

from rlagent.launch.rollout_pool import RolloutPool
from rlagent.types import Reward


@dataclass(frozen=True, kw_only=True)
class Played:
    """What one rollout came to, and what was recorded of it."""

    reward: Reward
    calls: list[dict[str, Any]]
    row: dict[str, Any]

    @property
    def prompts(self) -> list[str]:
        """What the model was shown at each call."""
        return [TOKENIZER.decode(call["prompt_ids"]) for call in self.calls]


def calling(name: str, **arguments: Any) -> str:
    """A tool call as the demo's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(kw_only=True)
class Stage:
    """A router with a worker process that plays `function`. Its model says what the script of the task says, in turn."""

    harness: Harness
    pool: RolloutPool

    async def play(self, task: Mapping[str, Any], says: Sequence[str], *, begins: Sequence[int] = (0,)) -> Played:
        """One rollout; fails when it failed, when the model was asked more often, or when not just these calls begin a chain."""
        session = await self.harness.admin.new_session()
        left = [said(text) for text in says]

        def script(_body: dict[str, Any]) -> Reply:
            return left.pop(0)

        self.harness.engine.script = script
        outcome = await self.pool.run(task, session.to_json())
        assert outcome.status == "completed", outcome.error
        assert outcome.reward is not None
        assert not outcome.reward.failed
        assert not left
        await self.harness.admin.finish(session.session_id, reward=outcome.reward)
        calls = await self.harness.admin.calls(session.session_id)
        rows = await self.harness.admin.trajectories(session.session_id)
        assert len(rows) == len(begins)
        assert [number for number, call in enumerate(calls) if call["origin"] == "fresh"] == list(begins)
        sampled = [token for call in calls for token in call["choices"][0]["output_ids"]]
        tokens = [pair for row in rows for pair in zip(row["token_ids"], row["loss_mask"], strict=True)]
        assert [token for token, mask in tokens if mask] == sampled
        assert {row["reward"] for row in rows} == {outcome.reward.total}
        return Played(reward=outcome.reward, calls=calls, row=rows[0])


@asynccontextmanager
async def stage(directory: Path, function: str) -> AsyncIterator[Stage]:
    """A router whose model could read 64k tokens, and a worker."""
    model = directory / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    pool = RolloutPool(function, workers=1, concurrency=8, timeout_s=120.0, logs=directory)
    async with router(directory, lambda _body: said("?"), model=model) as harness, pool:
        yield Stage(harness=harness, pool=pool)
