"""What an agent's session must look like, checked against what the scripted engine was given and answered."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_process import widen_context
from fake_engine import Reply, Script
from router_harness import MODEL, Harness, said

LOGPROB = -0.5  # of every token of a scripted engine
CONTEXT = 400_000  # agents' prompts are long, and the demo's tokenizer has short tokens


def wide_model(directory: Path) -> Path:
    """The demo's model with room for long prompts."""
    shutil.copytree(MODEL, directory / "model")
    widen_context(directory / "model", CONTEXT)
    return directory / "model"


def calls(*pairs: tuple[str, str], text: str = "") -> str:
    """A turn of a Hermes model that says a text and calls tools: (name, JSON text of the arguments)."""
    written = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in pairs
    )
    return "\n".join([*([text] if text else []), *written])


class Turns:
    """A script that says one text after the other, and keeps what it said. One more request than texts is an error."""

    def __init__(self, *texts: str) -> None:
        self._left = list(texts)
        self.said: list[Reply] = []

    @property
    def script(self) -> Script:
        def answer(_: dict[str, Any]) -> Reply:
            assert self._left, "the agent asked once more than the script knows"
            self.said.append(said(self._left.pop(0)))
            return self.said[-1]

        return answer

    @property
    def done(self) -> bool:
        """Whether all was said."""
        return not self._left


async def check_one_chain(harness: Harness, session_id: str, turns: Turns, *, reward: float) -> dict[str, Any]:
    """The session is one row: every prompt extends the one before, and the mask is 1 exactly on what was sampled."""
    assert turns.done
    await harness.admin.finish(session_id, reward=reward)
    recorded = await harness.admin.calls(session_id)
    assert [call["reason"] for call in recorded] == ["first"] + [""] * (len(turns.said) - 1)
    (row,) = await harness.admin.trajectories(session_id)
    check_row(row, [body["input_ids"] for body in harness.engine.requests], turns.said)
    assert row["reward"] == reward
    return row


async def check_rewritten(harness: Harness, session_id: str, turns: Turns, *, reward: float) -> None:
    """The agent rewrote what it was answered: every call is a row of its own, of its prompt and its answer, with the one reward."""
    assert turns.done
    await harness.admin.finish(session_id, reward=reward)
    recorded = await harness.admin.calls(session_id)
    assert [call["reason"] for call in recorded] == ["first"] + ["edited"] * (len(turns.said) - 1)
    rows = await harness.admin.trajectories(session_id)
    assert len(rows) == len(turns.said)
    for row, body, reply in zip(rows, harness.engine.requests, turns.said, strict=True):
        check_row(row, [body["input_ids"]], [reply])
        assert row["reward"] == reward


def check_row(row: dict[str, Any], prompts: Sequence[list[int]], said: Sequence[Reply]) -> None:
    """A row's ids are the last prompt and its answer; each turn's answer stands, masked in, right behind that turn's prompt."""
    assert row["token_ids"] == [*prompts[-1], *said[-1].ids]
    mask = [0] * len(row["token_ids"])
    for prompt, reply in zip(prompts, said, strict=True):
        start, end = len(prompt), len(prompt) + len(reply.ids)
        assert row["token_ids"][:start] == prompt
        assert row["token_ids"][start:end] == list(reply.ids)
        mask[start:end] = [1] * len(reply.ids)
    assert [int(bit) for bit in row["loss_mask"]] == mask
    assert row["logprobs"] == [LOGPROB * bit for bit in mask]
