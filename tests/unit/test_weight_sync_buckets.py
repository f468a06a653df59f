"""Buckets and their pickles: layout, what globals they name, and that the engine reads what was written."""

import base64
import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.engine.unpickle import read_bucket
from rlagent.errors import EngineError
from rlagent.trainer.weight_sync.buckets import ALIGNMENT, make_buckets
from rlagent.trainer.weight_sync.sglang_pickle import serialize_bucket

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TENSORS = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), DTYPES), min_size=1, max_size=8)
# Of SafeUnpickler.ALLOWED_GLOBALS and its special cases in SGLang 0.5.21, what a bucket of CPU tensors needs.
SGLANG_ALLOWS = {
    "torch._utils _rebuild_tensor_v2",
    "torch.storage _load_from_bytes",
    "collections OrderedDict",
    "torch Size",
    "torch float32",
    "torch bfloat16",
    "torch float16",
    "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata",
}


def weights(shapes: list[tuple[list[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.randn(shape).to(dtype) for i, (shape, dtype) in enumerate(shapes)}


@given(TENSORS, st.integers(1, 300))
@settings(deadline=None, max_examples=60)
def test_every_tensor_arrives_as_it_was_in_buckets_of_the_right_size(
    shapes: list[tuple[list[int], torch.dtype]], limit: int
) -> None:
    given_tensors = weights(shapes)
    found: dict[str, torch.Tensor] = {}
    for bucket in make_buckets(given_tensors.items(), limit):
        assert bucket.flat.nbytes <= limit or len(bucket.slots) == 1
        assert all(slot.start_idx % ALIGNMENT == 0 for slot in bucket.slots)
        found |= read_bucket(serialize_bucket(bucket.flat, bucket.slots), "flattened_bucket")
    assert list(found) == list(given_tensors)
    for name, tensor in given_tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_payload_names_only_what_sglang_allows() -> None:
    (bucket,) = make_buckets(weights([([2, 3], torch.float32), ([4], torch.bfloat16)]).items(), 10_000)
    payload = base64.b64decode(serialize_bucket(bucket.flat, bucket.slots))
    named = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add(f"{module} {name}")
            return SimpleNamespace if module.startswith("sglang") else super().find_class(module, name)

    content = Recorder(io.BytesIO(payload)).load()
    assert named <= SGLANG_ALLOWS
    assert "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata" in named
    first = content["metadata"][0]
    assert (first.name, tuple(first.shape), first.dtype, first.start_idx, first.end_idx) == (
        "layer.0.weight", (2, 3), torch.float32, 0, 24,
    )  # fmt: skip


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/rlagent-was-here",)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_payload_that_names_anything_else_is_refused(load_format: str | None) -> None:
    for attack in (Attack(), eval, [Attack()], {"flattened_tensor": Attack(), "metadata": []}):
        payload = base64.b64encode(pickle.dumps(attack)).decode()
        with pytest.raises(EngineError, match="allow-list"):
            read_bucket(payload, load_format)
    assert not Path("/tmp/rlagent-was-here").exists()


@pytest.mark.parametrize("payload", ["", "###", "AAAA", base64.b64encode(b"\x80\x04N.").decode()])
def test_a_broken_payload_is_refused(payload: str) -> None:
    for load_format in (None, "flattened_bucket"):
        with pytest.raises(EngineError):
            read_bucket(payload, load_format)
