"""How one packed microbatch is laid out for attention: computed once, on the host, and used by every layer.

A stream of N tokens holds rows back to back. Without context parallelism attention runs on a few buckets of rows of
like length, padded to the longest of the bucket: causality already hides the padding at the right from every real
query. Tokens that rows share (shared_prefixes.py) are computed once and stand in each of these rows for attention.
With context parallelism of c, the stream is cut into 2c equal chunks and rank r takes chunks r and 2c-1-r,
which balances causal work for long rows and short ones alike; a query segment then attends to its row's keys up to
its own end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlagent.trainer.model.megatron import PackedSeqParams
from rlagent.trainer.model.rows import Places
from rlagent.types import Int32Array, Int64Array

MAX_PADDED_RATIO: Final = 1.1
"""Padded over real tokens of a bucket: below it more buckets cost more calls than they save tokens (measured for
rows of 120 to 280).
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`rows` rows padded to `length` tokens, at [start, start + rows * length) of the padded stream."""

    start: int
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Local queries [query_start, query_end) see the stream's keys [key_start, key_end), aligned at their ends,
    causally.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int


def chunks(num_tokens: int, size: int, rank: int) -> list[tuple[int, int]]:
    """The parts [start, end) of a stream that context-parallel rank `rank` of `size` holds, in order."""
    if size == 1:
        return [(0, num_tokens)]
    assert num_tokens % (2 * size) == 0, "the stream is padded to a multiple of 2 * context"
    width = num_tokens // (2 * size)
    return [(part * width, (part + 1) * width) for part in (rank, 2 * size - 1 - rank)]


def local_tokens(num_tokens: int, size: int, rank: int) -> Int64Array:
    """Stream indices of this rank's tokens, in their local order."""
    return np.concatenate([np.arange(start, end, dtype=np.int64) for start, end in chunks(num_tokens, size, rank)])


def segments(cu_seqlens: Int32Array, size: int, rank: int) -> list[Segment]:
    """Cut a rank's chunks at row boundaries."""
    found: list[Segment] = []
    local = 0
    bounds = cu_seqlens.tolist()
    for start, end in chunks(bounds[-1], size, rank):
        for row_start, row_end in itertools.pairwise(bounds):
            first, last = max(start, row_start), min(end, row_end)
            if first < last:
                found.append(Segment(local, local + last - first, row_start, last))
                local += last - first
    return found


def buckets(cu_seqlens: Int32Array) -> tuple[list[Bucket], Int64Array]:
    """Rows grouped by length, and for each token its place in the padded stream."""
    lengths = np.diff(cu_seqlens).astype(np.int64)
    order = np.argsort(lengths, kind="stable")
    place = np.empty(int(cu_seqlens[-1]), dtype=np.int64)
    found: list[Bucket] = []
    start = 0
    members: list[int] = []

    def close() -> int:
        longest = int(lengths[members[-1]])
        for slot, row in enumerate(members):
            first = start + slot * longest
            place[cu_seqlens[row] : cu_seqlens[row + 1]] = np.arange(first, first + lengths[row])
        found.append(Bucket(start, len(members), longest))
        return start + len(members) * longest

    real = 0
    for row in order.tolist():
        length = int(lengths[row])
        if length == 0:
            continue
        if members and length * (len(members) + 1) > MAX_PADDED_RATIO * (real + length):
            start, members, real = close(), [], 0
        members.append(row)
        real += length
    close()
    return found, place


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """What megatron hands unchanged to every attention: its own packed parameters plus our layout and rotary tables.

    cos and sin are [t, 1, head_size] for the rank's t tokens. `padded` places them in the padded stream of the buckets,
    and `whole`, where rows share tokens, in the stream of whole rows that cu_seqlens cut. `experts` [t, layers * top_k]
    int16 are those to replay (-1: the router's own); under sequence parallelism of the tokens that this rank routes.
    """

    buckets: tuple[Bucket, ...] = ()
    padded: Places | None = None
    whole: Places | None = None
    segments: tuple[Segment, ...] = ()
    cos: Tensor | None = None
    sin: Tensor | None = None
    experts: Tensor | None = None


def pack_rows(
    cu_seqlens: Int32Array,
    position_ids: Int32Array,
    inverse_frequencies: Tensor,
    *,
    context: tuple[int, int],
    dtype: torch.dtype,
    shared: tuple[npt.NDArray[np.bool_], Int64Array] | None = None,
) -> PackedRows:
    """Lay out a stream for context rank `context[1]` of `context[0]`; position_ids [t] are those of the rank's own
    tokens. shared: which tokens of the whole rows are computed and what each of them is, by `shared_tokens`; without context
    parallelism only.
    """
    device = inverse_frequencies.device
    size, rank = context
    angles = torch.from_numpy(position_ids).to(device).float()[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    cu = torch.from_numpy(cu_seqlens).to(device)
    longest = int(np.diff(cu_seqlens).max())
    fields: dict[str, Any] = {"segments": tuple(segments(cu_seqlens, size, rank))}
    if size == 1:
        found, place = buckets(cu_seqlens)
        end = found[-1].start + found[-1].rows * found[-1].length
        copies = [] if shared is None else [torch.from_numpy(values).to(device) for values in shared]
        fields = {"buckets": tuple(found), "padded": Places.of(torch.from_numpy(place).to(device), end, *copies)}
        if copies:
            fields["whole"] = Places.of(torch.arange(len(place), device=device), len(place), *copies)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        **fields,
    )
