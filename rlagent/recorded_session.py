"""One session, or the newest ones, of wherever they were recorded: a run's directory, a buffer's file or a running router.

`rlagent inspect` shows what is read here. Invariant: all three sources give the same, the JSON that the router answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlagent.client import RouterClient
from rlagent.errors import LoadError, NotFoundError
from rlagent.recorded import recorded_buffer
from rlagent.router.shown import call_json, session_json, trajectory_json
from rlagent.router.tokenizer import Tokenizer

Json = Mapping[str, Any]

NUM_NEWEST: Final = 20  # sessions that a list shows: about a screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A session as the router shows it, and the tokenizer that its ids belong to."""

    session: Json
    calls: Sequence[Json]
    rows: Sequence[Json]
    tokenizer: Tokenizer


async def newest(source: str, *, admin_key: str | None) -> Sequence[Json]:
    """The newest sessions of a source, the newest first."""
    if _is_url(source):
        async with RouterClient(source, admin_key=admin_key) as client:
            return await client.sessions(limit=NUM_NEWEST)
    async with recorded_buffer(Path(source)) as buffer:
        return [session_json(session) for session in await buffer.sessions(limit=NUM_NEWEST)]


async def read(source: str, session_id: str, *, admin_key: str | None, model: Path | None) -> Recorded:
    """A session of a router (http://...), a run directory or a buffer's file. NotFoundError if there is none of that id."""
    if _is_url(source):
        async with RouterClient(source, admin_key=admin_key) as client:
            session, calls = await client.session(session_id), await client.calls(session_id)
            rows, snapshot = await client.trajectories(session_id), (await client.policy())["snapshot"]
            known = None if snapshot is None else snapshot["path"]
    else:
        async with recorded_buffer(Path(source)) as buffer:
            found = await buffer.session(session_id)
            if found is None:
                ids = ", ".join(one.session_id for one in await buffer.sessions(limit=3))
                raise NotFoundError(f"{source} holds no session {session_id!r}; the newest are: {ids or 'none'}")
            by_id = {call.call_id: call for call in await buffer.calls(session_id)}
            session, calls = session_json(found), [call_json(call, by_id) for call in by_id.values()]
            rows = [trajectory_json(row) for row in await buffer.trajectories(session_id)]
            policy = buffer.newest_snapshot()
            known = None if policy is None else policy.snapshot
    return Recorded(session=session, calls=calls, rows=rows, tokenizer=_tokenizer(model, known))


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _tokenizer(model: Path | None, known: str | None) -> Tokenizer:
    if model is None and (known is None or not Path(known).is_dir()):
        raise LoadError(
            f"the model directory {known!r} is not on this machine; name one with its tokenizer by --model DIR"
        )
    return Tokenizer.load(model if model is not None else Path(str(known)))
