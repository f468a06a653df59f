"""Packing and attention: every token in its place, and every arrangement equal to dense causal attention row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlagent.trainer.model.attention import bucketed_attention, segment_attention
from rlagent.trainer.model.packing import MAX_PADDED_RATIO, buckets, chunks, local_tokens, pack_rows, segments
from rlagent.trainer.model.rows import Places, gather_rows, scatter_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
HEADS, GROUPS, SIZE = 4, 2, 8


def bounds(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention written out, one row at a time."""
    outs = []
    start = 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
        scores = (q @ k.transpose(1, 2)) / math.sqrt(SIZE)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outs)


def streams(total: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(total)
    return tuple(torch.randn(total, heads, SIZE, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS))  # type: ignore[return-value]


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_each_token_has_a_place_of_its_own_in_a_bucket_that_is_little_padded(lengths: list[int]) -> None:
    found, place = buckets(bounds(lengths))
    assert len(set(place.tolist())) == sum(lengths)
    assert place.max() < found[-1].start + found[-1].rows * found[-1].length
    assert sum(bucket.rows for bucket in found) == len(lengths)
    padded = sum(bucket.rows * bucket.length for bucket in found)
    assert padded <= MAX_PADDED_RATIO * sum(lengths)


@given(LENGTHS, st.sampled_from([1, 2, 3]))
@settings(max_examples=40, deadline=None)
def test_context_ranks_share_the_stream_and_each_query_sees_its_row_up_to_itself(lengths: list[int], size: int) -> None:
    padding = -sum(lengths) % (2 * size)
    cu = bounds([*lengths, padding] if padding else lengths)
    total = int(cu[-1])
    own = [local_tokens(total, size, rank) for rank in range(size)]
    assert sorted(np.concatenate(own).tolist()) == list(range(total))
    for rank in range(size):
        assert sum(end - start for start, end in chunks(total, size, rank)) == total // size
        for part in segments(cu, size, rank):
            queries = own[rank][part.query_start : part.query_end]
            assert part.key_start in cu
            assert queries[-1] == part.key_end - 1
            assert part.key_start <= queries[0]


@given(LENGTHS)
@settings(max_examples=15, deadline=None)
def test_bucketed_attention_and_its_gradients_are_those_of_dense_attention(lengths: list[int]) -> None:
    cu = bounds(lengths)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    rows = pack_rows(cu, positions, torch.ones(SIZE // 2), context=(1, 0), dtype=torch.float32)
    inputs = streams(sum(lengths))
    found = bucketed_attention(*inputs, rows, 1 / math.sqrt(SIZE))
    wanted = dense(*inputs, lengths)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    for one, other in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_segment_attention_of_all_context_ranks_is_dense_attention(size: int) -> None:
    lengths = [5, 13, 1, 24, 5]
    inputs = streams(sum(lengths))
    wanted = dense(*inputs, lengths)
    found = torch.empty_like(wanted)
    for rank in range(size):
        own = torch.from_numpy(local_tokens(sum(lengths), size, rank))
        parts = tuple(segments(bounds(lengths), size, rank))
        found[own] = segment_attention(inputs[0][own], inputs[1], inputs[2], parts, 1 / math.sqrt(SIZE))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_scatter_and_gather_are_each_others_gradient() -> None:
    index = torch.tensor([4, 0, 2])
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    places = Places.of(index, 5)
    assert torch.autograd.gradcheck(lambda value: scatter_rows(value, places), (x,))
    assert torch.autograd.gradcheck(lambda value: gather_rows(value, index), (y,))
    assert torch.equal(gather_rows(scatter_rows(x, places), index), x)


def test_gradients_of_copies_and_of_rows_taken_twice_add_up() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    computed, source = torch.tensor([True, True, False, True, False]), torch.tensor([0, 1, 0, 2, 1])
    places = Places.of(torch.tensor([6, 0, 3, 2, 5]), 7, computed, source)
    assert torch.equal(scatter_rows(x, places)[[6, 0, 3, 2, 5]], x[source])
    assert torch.autograd.gradcheck(lambda value: scatter_rows(value, places), (x,))
    index = torch.tensor([1, 1, 0, 1])
    assert torch.autograd.gradcheck(lambda value: gather_rows(value, index, repeated=True), (x,))
