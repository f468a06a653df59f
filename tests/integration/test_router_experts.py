"""Experts on their way from engines to a row: over turns, aborts and several choices, each token has those of its own position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fake_engine import Reply
from router_harness import TOKENIZER, USER, always, in_turn, router, said

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.router.config import RouterConfig
from rlagent.trajectory import rows
from rlagent.types import Trajectory

RECORDED = RouterConfig(record_experts=True)


async def recorded(directory: Path) -> list[Trajectory]:
    """The rows of the one session of a router that has ended."""
    buffer = await Buffer.open(directory / "buffer.db", BufferConfig())
    try:
        (session,) = await buffer.sessions()
        return list(rows(session, await buffer.calls(session.session_id)))
    finally:
        await buffer.close()


async def test_a_second_turn_and_a_resumed_call_add_the_experts_of_their_own_tokens(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("The code is 7.")
    aborted = Reply(ids=ids[:2], finish={"type": "abort", "message": "paused"})
    async with router(tmp_path, in_turn(said("A first answer."), aborted, said(" And more.")), config=RECORDED) as r:
        r.engine.tells_experts = True
        first = (await r.chat()).json()["choices"][0]["message"]
        turns = [*USER, first, {"role": "user", "content": "And now?"}]
        assert (await r.chat(turns, stream=True)).status_code == 200
        asked = [request["routed_experts_start_len"] for request in r.engine.requests]
        lengths = [len(request["input_ids"]) for request in r.engine.requests]
    (row,) = await recorded(tmp_path)
    assert row.experts is not None
    turn_one = lengths[0] + len(TOKENIZER.encode("A first answer.")) + 1
    # Each request is asked from the last token on that the one before did not feed.
    assert asked == [0, turn_one - 1, lengths[2] - 1]
    fed = np.arange(len(row))
    request = np.searchsorted([turn_one - 1, lengths[2] - 1], fed, side="right")
    wanted = np.stack((fed, request), axis=1)
    wanted[-1] = -1
    assert np.array_equal(row.experts, wanted)


async def test_an_engine_that_tells_none_leaves_a_row_without(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("Yes.")), config=RECORDED) as r:
        await r.chat()
        assert r.engine.requests[0]["return_routed_experts"]
    (row,) = await recorded(tmp_path)
    assert row.experts is None


async def test_a_turn_without_experts_between_others_is_unknown(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("Yes.")), config=RECORDED) as r:
        first = (await r.chat()).json()["choices"][0]["message"]
        r.engine.tells_experts = True
        await r.chat([*USER, first, {"role": "user", "content": "And now?"}])
        start = r.engine.requests[1]["routed_experts_start_len"]
    (row,) = await recorded(tmp_path)
    assert row.experts is not None
    assert (row.experts[:start] == -1).all()
    assert np.array_equal(row.experts[start:-1, 0], np.arange(start, len(row) - 1))


async def test_they_are_not_asked_for_by_default(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("Yes."))) as r:
        r.engine.tells_experts = True
        await r.chat()
        assert "return_routed_experts" not in r.engine.requests[0]
    (row,) = await recorded(tmp_path)
    assert row.experts is None
