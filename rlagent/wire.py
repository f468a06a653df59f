"""The binary body of a lease: arrays of all rows end to end in one safetensors file, the rest as JSON in its header.

From the learner's routes (encode) to the driver's client (decode). No pickle: decode checks names, dtypes and
lengths, and raises RouterError for anything else. Invariant: decode(encode(lease)) equals the lease, arrays bit for
bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import safetensors
import safetensors.numpy

from rlagent.errors import RouterError
from rlagent.types import Group, Lease, Reward, Rollout, Trajectory

CONTENT_TYPE: Final = "application/vnd.rlagent.lease+safetensors"
FORMAT: Final = "rlagent-lease-3"
# Every per-token array of a Trajectory, in its order, with its dtype. row_offsets [rows + 1] int64 cuts them into rows.
ARRAYS: Final[Mapping[str, type[np.generic]]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "temperature": np.float32,
    "versions": np.int32,
    "turn": np.int32,
}
_OFFSETS: Final = "row_offsets"
# [tokens of the rows that have them, layers * top_k] int16: those rows' experts end to end.
_EXPERTS: Final = "experts"
_HEADER_SIZE_BYTES: Final = 8


def encode_lease(lease: Lease) -> bytes:
    """The body of a lease."""
    rows = [row for group in lease.groups for rollout in group.rollouts for row in rollout.rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    arrays: dict[str, npt.NDArray[Any]] = {_OFFSETS: offsets}
    for name, dtype in ARRAYS.items():
        pieces = [np.asarray(getattr(row, name), dtype) for row in rows]
        arrays[name] = np.concatenate(pieces) if pieces else np.zeros(0, dtype)
    experts = [row.experts for row in rows if row.experts is not None]
    if experts:
        arrays[_EXPERTS] = np.concatenate(experts)
    header = {
        "lease_id": lease.lease_id,
        "step": lease.step,
        "expires_at": lease.expires_at,
        "redelivered": lease.redelivered,
        "lags": [[version, lag] for version, lag in lease.lags.items()],
        "groups": [_group_header(group) for group in lease.groups],
    }
    return safetensors.numpy.save(arrays, metadata={"format": FORMAT, "lease": orjson.dumps(header).decode()})


def decode_lease(body: bytes) -> Lease:
    """The lease of a body. RouterError if it is not one."""
    try:
        metadata = _metadata(body)
        if metadata.get("format") != FORMAT:
            raise RouterError(
                f"a lease of format {metadata.get('format')!r}, not {FORMAT!r}; use the same rlagent on both sides"
            )
        header = orjson.loads(metadata["lease"])
        pieces = _pieces(safetensors.numpy.load(body), _rows_with_experts(header))
        groups: list[Group] = []
        for group in header["groups"]:
            groups.append(_group(group, pieces))
        lease = Lease(
            lease_id=header["lease_id"],
            step=header["step"],
            expires_at=header["expires_at"],
            redelivered=header["redelivered"],
            lags={int(version): int(lag) for version, lag in header["lags"]},
            groups=tuple(groups),
        )
    except (
        safetensors.SafetensorError,
        orjson.JSONDecodeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise RouterError(
            f"not a lease ({type(error).__name__}: {error}); is the URL a router of this version?"
        ) from error
    return lease


def _group_header(group: Group) -> dict[str, object]:
    return {
        "group_id": group.group_id,
        "num_missing": group.num_missing,
        "ungrouped": group.ungrouped,
        "rollouts": [
            {
                "rollout_id": rollout.rollout_id,
                "task_id": rollout.task_id,
                "components": dict(rollout.reward.components),
                "calls": dict(rollout.reward.calls),
                "rows": [
                    {
                        "call_ids": row.call_ids,
                        "rollout_id": row.rollout_id,
                        "group_id": row.group_id,
                        "reward": row.reward,
                        "truncated": row.truncated,
                        "experts": row.experts is not None,
                    }
                    for row in rollout.rows
                ],
            }
            for rollout in group.rollouts
        ],
    }


def _metadata(body: bytes) -> Mapping[str, str]:
    """The metadata of a safetensors file: its header is a little-endian length and that many bytes of JSON."""
    size = int.from_bytes(body[:_HEADER_SIZE_BYTES], "little")
    header = orjson.loads(body[_HEADER_SIZE_BYTES : _HEADER_SIZE_BYTES + size])
    metadata: Mapping[str, str] = header["__metadata__"]
    return metadata


def _rows_with_experts(header: Mapping[str, Any]) -> list[bool]:
    """Of each row, whether its experts were recorded."""
    return [
        bool(row["experts"]) for group in header["groups"] for rollout in group["rollouts"] for row in rollout["rows"]
    ]


def _pieces(
    arrays: Mapping[str, npt.NDArray[Any]], with_experts: Sequence[bool]
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The arrays of each row in turn, after checking that they fit one another."""
    offsets = arrays[_OFFSETS]
    if (
        offsets.dtype != np.int64
        or offsets.ndim != 1
        or len(offsets) == 0
        or offsets[0] != 0
        or (np.diff(offsets) < 0).any()
    ):
        raise ValueError(f"{_OFFSETS} must be an increasing int64 array that starts at 0")
    for name, dtype in ARRAYS.items():
        if arrays[name].dtype != dtype or arrays[name].shape != (offsets[-1],):
            found = f"{arrays[name].dtype}{list(arrays[name].shape)}"
            raise ValueError(f"{name} is {found}, not {np.dtype(dtype)}[{offsets[-1]}]")
    pieces = [{name: arrays[name][start:end] for name in ARRAYS} for start, end in pairwise(offsets.tolist())]
    if len(pieces) != len(with_experts):
        raise ValueError(f"{len(with_experts)} rows in the header, {len(pieces)} in the arrays")
    having = [piece for piece, given in zip(pieces, with_experts, strict=True) if given]
    bounds = np.cumsum([0, *(len(piece["token_ids"]) for piece in having)]).tolist()
    if having:
        experts = arrays[_EXPERTS]
        if experts.dtype != np.int16 or experts.ndim != 2 or len(experts) != bounds[-1]:
            raise ValueError(
                f"{_EXPERTS} is {experts.dtype}{list(experts.shape)}, not int16[{bounds[-1]}, layers * top_k]"
            )
        for piece, (start, end) in zip(having, pairwise(bounds), strict=True):
            piece[_EXPERTS] = experts[start:end]
    return iter(pieces)


def _group(header: Mapping[str, Any], pieces: Iterator[dict[str, npt.NDArray[Any]]]) -> Group:
    rollouts = []
    for rollout in header["rollouts"]:
        rows: list[Trajectory] = []
        for row in rollout["rows"]:
            rows.append(_row(row, next(pieces)))
        rollouts.append(
            Rollout(
                rollout_id=rollout["rollout_id"],
                task_id=rollout["task_id"],
                reward=Reward(components=rollout["components"], calls=rollout["calls"]),
                rows=tuple(rows),
            )
        )
    return Group(
        group_id=header["group_id"],
        rollouts=tuple(rollouts),
        num_missing=header["num_missing"],
        ungrouped=header["ungrouped"],
    )


def _row(header: Mapping[str, Any], piece: Mapping[str, npt.NDArray[Any]]) -> Trajectory:
    return Trajectory(
        token_ids=piece["token_ids"],
        loss_mask=piece["loss_mask"],
        logprobs=piece["logprobs"],
        temperature=piece["temperature"],
        versions=piece["versions"],
        turn=piece["turn"],
        call_ids=tuple(header["call_ids"]),
        rollout_id=header["rollout_id"],
        group_id=header["group_id"],
        reward=header["reward"],
        truncated=header["truncated"],
        experts=piece.get(_EXPERTS),
    )
