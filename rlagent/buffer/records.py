"""Sessions, calls and rewards as database rows, and back.

Invariant: reading what was written gives an equal record, arrays bit for bit. Nothing else knows the columns.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import orjson

from rlagent.buffer.blobs import pack, pack_arrays, pack_small, unpack, unpack_arrays, unpack_small
from rlagent.buffer.database import Row, Value
from rlagent.errors import RequestError, StoreError
from rlagent.trajectory import prompt_key
from rlagent.types import Call, Choice, ParentRef, PromptImage, Reward, Sampling, Session, VersionSpan

SESSION_COLUMNS: Final = (
    "session_id, key_hash, task_id, group_id, group_size, train, sampling, metadata, created_at, deadline_at, "
    "expires_at, state, status, reward, sealed_at"
)
CALL_COLUMNS: Final = (
    "call_id, session_id, position, parent_id, parent_choice, prompt_digest, "
    "delivery, head, arrays, experts, messages, served, client"
)
_SAMPLING: Final = tuple(field.name for field in fields(Sampling))


def marks(columns: str) -> str:
    """As many `?` as there are columns."""
    return ", ".join("?" * (columns.count(",") + 1))


def encode_session(session: Session) -> tuple[Value, ...]:
    """The values of SESSION_COLUMNS."""
    return (
        session.session_id,
        session.key_hash,
        session.task_id,
        session.group_id,
        session.group_size,
        int(session.train),
        _dumps(dict(session.sampling), "sampling"),
        _dumps(dict(session.metadata), "metadata"),
        session.created_at,
        session.deadline_at,
        session.expires_at,
        session.state,
        session.status,
        encode_reward(session.reward),
        session.sealed_at,
    )


def decode_session(row: Row) -> Session:
    """The inverse of encode_session."""
    return Session(
        session_id=row[0],
        key_hash=row[1],
        task_id=row[2],
        group_id=row[3],
        group_size=row[4],
        train=bool(row[5]),
        sampling=orjson.loads(row[6]),
        metadata=orjson.loads(row[7]),
        created_at=row[8],
        deadline_at=row[9],
        expires_at=row[10],
        state=row[11],
        status=row[12],
        reward=decode_reward(row[13]),
        sealed_at=row[14],
    )


def encode_reward(reward: Reward | None) -> str | None:
    """JSON of a reward; RequestError for a number that is not finite."""
    if reward is None:
        return None
    for name, number in (*reward.components.items(), *reward.calls.items()):
        if not math.isfinite(number):
            raise RequestError(f"reward {name!r} is {number}; a reward must be a finite number")
    return _dumps({"components": dict(reward.components), "calls": dict(reward.calls)}, "reward")


def decode_reward(text: str | None) -> Reward | None:
    """The inverse of encode_reward."""
    return None if text is None else Reward(**orjson.loads(text))


def add_rewards(first: Reward | None, second: Reward) -> Reward:
    """Component by component and call by call, the sum."""
    if first is None:
        return second
    components, calls = dict(first.components), dict(first.calls)
    for name, number in second.components.items():
        components[name] = components.get(name, 0.0) + number
    for name, number in second.calls.items():
        calls[name] = calls.get(name, 0.0) + number
    return replace(first, components=components, calls=calls)


def encode_call(call: Call) -> tuple[Value, ...]:
    """The values of CALL_COLUMNS."""
    head: dict[str, object] = {
        "dialect": call.dialect,
        "model": call.model,
        "origin": call.origin,
        "reason": call.reason,
        "prompt_len": call.prompt_len,
        "num_suffix": len(call.prompt_suffix),
        "sampling": {name: getattr(call.sampling, name) for name in _SAMPLING},
        "started_at": call.started_at,
        "finished_at": call.finished_at,
        "body_digest": call.body_digest,
        "choices": [_choice_head(choice) for choice in call.choices],
    }
    if call.num_fed is not None:
        head["num_fed"] = call.num_fed
        head["images"] = [(image.digest, image.position, image.num_tokens) for image in call.images]
    suffix = np.ascontiguousarray(call.prompt_suffix, np.int32)
    arrays: list[np.ndarray[Any, Any]] = [suffix]
    for choice in call.choices:
        _check_choice(call, choice)
        arrays += [np.asarray(choice.output_ids, np.int32), np.asarray(choice.logprobs, np.float32)]
    return (
        call.call_id,
        call.session_id,
        call.index,
        call.parent.call_id if call.parent else None,
        call.parent.choice if call.parent else None,
        hashlib.blake2b(prompt_key(call), digest_size=16).hexdigest(),
        call.delivery,
        _dumps(head, "call"),
        pack_arrays(arrays),
        pack_small([choice.experts for choice in call.choices if choice.experts is not None]),
        pack(call.messages),
        pack(call.served),
        pack(call.client),
    )


def decode_call(row: Row) -> Call:
    """The inverse of encode_call."""
    head = orjson.loads(row[7])
    layout: list[tuple[type[np.generic], int]] = [(np.int32, head["num_suffix"])]
    for choice in head["choices"]:
        layout += [(np.int32, choice["length"]), (np.float32, choice["length"])]
    arrays = unpack_arrays(row[8], layout)
    experts = iter(unpack_small(row[9], [choice["experts"] for choice in head["choices"] if choice["experts"]]))
    choices = tuple(
        Choice(
            output_ids=arrays[1 + 2 * i],
            logprobs=arrays[2 + 2 * i],
            versions=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in choice["versions"]),
            finish_reason=choice["finish_reason"],
            matched_stop=choice["matched_stop"],
            parse_status=choice["parse_status"],
            trainable=choice["trainable"],
            experts=next(experts) if choice["experts"] else None,
        )
        for i, choice in enumerate(head["choices"])
    )
    sampling = head["sampling"]
    return Call(
        call_id=row[0],
        session_id=row[1],
        index=row[2],
        parent=None if row[3] is None else ParentRef(call_id=row[3], choice=row[4]),
        delivery=row[6],
        dialect=head["dialect"],
        model=head["model"],
        origin=head["origin"],
        reason=head["reason"],
        prompt_suffix=arrays[0],
        prompt_len=head["prompt_len"],
        choices=choices,
        sampling=Sampling(**{**sampling, "stop": tuple(sampling["stop"])}),
        messages=unpack(row[10]),
        served=unpack(row[11]),
        client=unpack(row[12]),
        started_at=head["started_at"],
        finished_at=head["finished_at"],
        body_digest=head["body_digest"],
        images=tuple(PromptImage(digest=d, position=p, num_tokens=n) for d, p, n in head.get("images", ())),
        num_fed=head.get("num_fed"),
    )


def _check_choice(call: Call, choice: Choice) -> None:
    """Lengths agree, logprobs are finite, and the version spans cover each token once."""
    length = len(choice.output_ids)
    if len(choice.logprobs) != length or not np.isfinite(choice.logprobs).all():
        raise StoreError(f"call {call.call_id}: {length} ids need as many finite logprobs, not {choice.logprobs}")
    if choice.experts is not None and len(choice.experts) != len(call.prompt_suffix) + length:
        raise StoreError(
            f"call {call.call_id}: {len(choice.experts)} rows of experts are not those of {len(call.prompt_suffix)} prompt ids and "
            f"{length} sampled ones"
        )
    end = 0
    for span in choice.versions:
        if span.start != end or span.end < span.start:
            break
        end = span.end
    if end != length:
        raise StoreError(f"call {call.call_id}: version spans {choice.versions} do not cover {length} tokens once each")


def _choice_head(choice: Choice) -> dict[str, object]:
    return {
        "length": len(choice.output_ids),
        "versions": [(span.version, span.start, span.end) for span in choice.versions],
        "finish_reason": choice.finish_reason,
        "matched_stop": choice.matched_stop,
        "parse_status": choice.parse_status,
        "trainable": choice.trainable,
        "experts": None if choice.experts is None else choice.experts.shape,
    }


def _dumps(value: object, name: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise StoreError(f"{name} is not plain JSON: {error}") from error
