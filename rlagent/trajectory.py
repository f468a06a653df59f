"""Calls to rows: from the forest of a session's calls to its root-to-leaf trajectories. Pure; from buffer to learner.

A node of the forest is one choice of one call; its parent is the choice that the call extends. A row is the path from
a root to a choice that nothing kept extends. Its ids are, id for id, what the engine was given and what it sampled
along that path.

Invariant: each sampled token of a kept, trainable choice has loss_mask True in exactly one row: the first, in the
order of (call index, choice) of the leaf, that contains it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlagent.types import (
    BoolArray,
    Call,
    Choice,
    Delivery,
    Float32Array,
    Int16Array,
    Int32Array,
    ParentRef,
    Session,
    Trajectory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """What decides whether a call is kept. `prompt` is the call's prompt suffix, or any digest of it."""

    call_id: str
    index: int
    parent: ParentRef | None
    delivery: Delivery
    prompt: str | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """The tokens that one choice of one call adds to a path.

    The call's prompt suffix, then the choice's output. All [k].
    """

    token_ids: Int32Array
    sampled: BoolArray
    logprobs: Float32Array
    temperature: Float32Array
    versions: Int32Array
    experts: Int16Array | None  # [k, layers * top_k] of the token before each


def kept_calls(heads: Iterable[CallHead]) -> frozenset[str]:
    """The call ids that are exported.

    A call that a kept call extends is kept: the agent has seen it. Of the others, orphans are dropped, and of calls
    with the same prompt those that were not delivered, where a delivered or extended one exists (an SDK's retry);
    where none does, the latest is kept.
    """
    by_depth: dict[int, list[CallHead]] = defaultdict(list)
    depth: dict[str, int] = {}
    for head in sorted(heads, key=lambda head: head.index):
        depth[head.call_id] = 0 if head.parent is None else depth[head.parent.call_id] + 1
        by_depth[depth[head.call_id]].append(head)
    extended: set[str] = set()
    kept: set[str] = set()
    for level in sorted(by_depth, reverse=True):
        siblings: dict[tuple[ParentRef | None, str | bytes], list[CallHead]] = defaultdict(list)
        for head in by_depth[level]:
            siblings[head.parent, head.prompt].append(head)
        for same_prompt in siblings.values():
            survivors = _survivors(same_prompt, extended)
            kept |= {head.call_id for head in survivors}
            extended |= {head.parent.call_id for head in survivors if head.parent is not None}
    return frozenset(kept)


def _survivors(same_prompt: Sequence[CallHead], extended: set[str]) -> list[CallHead]:
    seen = [head for head in same_prompt if head.call_id in extended or head.delivery == "delivered"]
    return seen or [head for head in same_prompt if head.delivery != "orphan"][-1:]


def head_of(call: Call) -> CallHead:
    """The head of a whole call."""
    return CallHead(
        call_id=call.call_id,
        index=call.index,
        parent=call.parent,
        delivery=call.delivery,
        prompt=prompt_key(call),
    )


def prompt_key(call: Call) -> bytes:
    """Equal for calls that ask the same behind one parent: the ids of the suffix, and which images stand in it."""
    return call.prompt_suffix.astype(np.int32, copy=False).tobytes() + "".join(
        image.digest for image in call.images
    ).encode()  # fmt: skip


def full_prompt_ids(call_id: str, calls: Mapping[str, Call]) -> Int32Array:
    """The whole prompt [prompt_len] int32 that the engine was given for a call, through its ancestors.

    O(prompt_len).
    """
    call = calls[call_id]
    pieces = [call.prompt_suffix]
    while call.parent is not None:
        choice = call.parent.choice
        call = calls[call.parent.call_id]
        pieces += [call.choices[choice].output_ids, call.prompt_suffix]
    return np.concatenate(pieces[::-1]).astype(np.int32, copy=False)


def rows(session: Session, calls: Iterable[Call]) -> tuple[Trajectory, ...]:
    """The root-to-leaf rows of a session, in the order of (call index, choice) of their leaves.

    Costs the sum of the rows' lengths. The reward is the session's total, 0 where it has none. A session that is not
    trained, or a choice that is not trainable or saw an image, has loss_mask False.
    """
    ordered = sorted(calls, key=lambda call: call.index)
    kept = kept_calls(head_of(call) for call in ordered)
    by_id = {call.call_id: call for call in ordered if call.call_id in kept}
    inner = {(call.parent.call_id, call.parent.choice) for call in by_id.values() if call.parent is not None}
    segments: dict[tuple[str, int], _Segment] = {}
    owned: set[tuple[str, int]] = set()
    result: list[Trajectory] = []
    for leaf in by_id.values():
        for choice in range(len(leaf.choices)):
            if (leaf.call_id, choice) not in inner:
                path = _path(leaf, choice, by_id)
                for call, number in path:
                    if (call.call_id, number) not in segments:
                        segments[call.call_id, number] = _segment(call, call.choices[number])
                result.append(_row(session, path, segments, owned))
    return tuple(result)


def _path(leaf: Call, choice: int, by_id: Mapping[str, Call]) -> list[tuple[Call, int]]:
    path = [(leaf, choice)]
    while (parent := path[-1][0].parent) is not None:
        path.append((by_id[parent.call_id], parent.choice))
    return path[::-1]


def _segment(call: Call, choice: Choice) -> _Segment:
    start, stop = len(call.prompt_suffix), len(call.prompt_suffix) + len(choice.output_ids)
    sampled = np.zeros(stop, np.bool_)
    sampled[start:] = True
    logprobs = np.zeros(stop, np.float32)
    logprobs[start:] = choice.logprobs
    temperature = np.ones(stop, np.float32)
    temperature[start:] = call.sampling.temperature
    versions = np.full(stop, -1, np.int32)
    for span in choice.versions:
        versions[start + span.start : start + span.end] = span.version
    return _Segment(
        token_ids=np.concatenate([call.prompt_suffix, choice.output_ids]).astype(np.int32, copy=False),
        sampled=sampled,
        logprobs=logprobs,
        temperature=temperature,
        versions=versions,
        experts=choice.experts,
    )


def _experts(pieces: Sequence[_Segment]) -> Int16Array | None:
    """What the engine gave to each token of a path; None where nothing of it was recorded."""
    width = next((piece.experts.shape[1] for piece in pieces if piece.experts is not None), None)
    if width is None:
        return None
    unknown = np.full((sum(len(piece.token_ids) for piece in pieces) + 1, width), -1, np.int16)
    start = 0
    for piece in pieces:
        end = start + len(piece.token_ids)
        if piece.experts is not None:
            unknown[start:end] = piece.experts
        start = end
    return unknown[1:]  # from the token before each to the token itself


def _row(
    session: Session,
    path: Sequence[tuple[Call, int]],
    segments: Mapping[tuple[str, int], _Segment],
    owned: set[tuple[str, int]],
) -> Trajectory:
    """One row; takes ownership of the choices on its path that no earlier row owns."""
    pieces = [segments[call.call_id, number] for call, number in path]
    masks: list[BoolArray] = []
    for (call, number), piece in zip(path, pieces, strict=True):
        node = (call.call_id, number)
        exact = call.choices[number].trainable and call.num_fed is None  # a learner of text cannot see images
        trained = session.train and exact and node not in owned
        masks.append(piece.sampled if trained else np.zeros(len(piece.sampled), np.bool_))
        owned.add(node)
    leaf, choice = path[-1]
    return Trajectory(
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        temperature=np.concatenate([piece.temperature for piece in pieces]),
        versions=np.concatenate([piece.versions for piece in pieces]),
        turn=np.repeat(np.arange(len(pieces), dtype=np.int32), [len(piece.token_ids) for piece in pieces]),
        call_ids=tuple(call.call_id for call, _ in path),
        rollout_id=session.session_id,
        group_id=session.group_id,
        reward=0.0 if session.reward is None else session.reward.total,
        truncated=leaf.choices[choice].finish_reason == "length",
        experts=_experts(pieces),
    )
