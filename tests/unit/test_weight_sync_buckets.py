"""Buckets: every tensor lies where its slot says, aligned, and no bucket is larger than it may be."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.trainer.weight_sync.buckets import ALIGNMENT, Bucket, make_buckets

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]
Weights = dict[str, torch.Tensor]


def filled(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bytes at all: NaN and infinities must travel too."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@st.composite
def some_weights(draw: st.DrawFn) -> Weights:
    """Scalars and empty tensors among them; some are views that are not contiguous."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True))
    found: Weights = {}
    for seed, name in enumerate(names):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        tensor = filled(shape, draw(st.sampled_from(DTYPES)), seed)
        found[name] = tensor.transpose(0, -1) if tensor.ndim and draw(st.booleans()) else tensor
    return found


def aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@given(some_weights(), st.integers(1, 400))
@settings(deadline=None, max_examples=100)
def test_every_tensor_lies_in_a_bucket_bit_for_bit(weights: Weights, limit: int) -> None:
    buckets = list(make_buckets(weights.items(), limit))
    assert [slot.name for bucket in buckets for slot in bucket.slots] == list(weights)
    for bucket in buckets:
        assert bucket.flat.dtype == torch.uint8
        assert bucket.flat.nbytes <= limit or len([slot for slot in bucket.slots if slot.numel]) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.start_idx == end
            assert slot.start_idx % ALIGNMENT == 0
            end = aligned(slot.end_idx)
            found = bucket.tensor(slot)
            assert (found.dtype, found.shape) == (weights[slot.name].dtype, weights[slot.name].shape)
            assert raw_bytes(found) == raw_bytes(weights[slot.name])
            assert slot.numel == slot.end_idx - slot.start_idx == found.nbytes
        assert bucket.flat.nbytes == end


@given(some_weights(), st.integers(1, 400))
@settings(deadline=None, max_examples=50)
def test_a_bucket_is_filled_before_the_next_is_begun(weights: Weights, limit: int) -> None:
    buckets = list(make_buckets(weights.items(), limit))
    for bucket, after in itertools.pairwise(buckets):
        assert bucket.flat.nbytes + aligned(after.slots[0].numel) > limit


def test_buckets_are_made_as_they_are_asked_for() -> None:
    """A model need not fit twice: tensors are drawn from the learner only as a bucket needs them."""
    drawn = []

    def weights() -> object:
        for index in range(10):
            drawn.append(index)
            yield str(index), torch.zeros(4)

    buckets = make_buckets(weights(), 32)  # type: ignore[arg-type]
    first = next(buckets)
    assert [slot.name for slot in first.slots] == ["0", "1"]
    assert drawn == [0, 1, 2]


def test_no_weights_make_no_bucket_and_the_learners_are_not_changed() -> None:
    assert list(make_buckets([], 100)) == []
    weight = torch.nn.Parameter(torch.ones(3))
    (bucket,) = make_buckets([("w", weight)], 100)
    assert isinstance(bucket, Bucket)
    bucket.flat.zero_()
    assert weight.tolist() == [1, 1, 1]
