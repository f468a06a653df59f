"""Weight payloads in SGLang's format: what the real library's classes pickle to, packed without gaps, damaged, hostile."""

import base64
import pickle
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlagent.engine.unpickle import read_bucket
from rlagent.errors import EngineError


@pytest.fixture
def metadata_class() -> Iterator[type]:
    """A class pickled under SGLang's module and name, as on a machine that has SGLang; here no such module exists."""

    @dataclass
    class FlattenedTensorMetadata:
        name: str
        shape: torch.Size
        dtype: torch.dtype
        start_idx: int
        end_idx: int
        numel: int

    path = "sglang.srt.weight_sync.tensor_bucket"
    FlattenedTensorMetadata.__module__, FlattenedTensorMetadata.__qualname__ = path, "FlattenedTensorMetadata"
    module = types.ModuleType(path)
    module.FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    parents = {"sglang": types.ModuleType("sglang")} | {
        name: types.ModuleType(name) for name in ("sglang.srt", "sglang.srt.weight_sync")
    }
    sys.modules |= {**parents, path: module}
    yield FlattenedTensorMetadata
    for name in (*parents, path):
        del sys.modules[name]


def encode(content: object) -> str:
    return base64.b64encode(pickle.dumps(content)).decode()


def flattened(weights: dict[str, torch.Tensor], make: type) -> dict[str, Any]:
    metadata, at = [], 0
    for name, tensor in weights.items():
        size = tensor.nbytes
        metadata.append(make(name, tensor.shape, tensor.dtype, at, at + size, size))
        at += size
    return {
        "flattened_tensor": torch.cat([t.flatten().view(torch.uint8) for t in weights.values()]),
        "metadata": metadata,
    }


WEIGHTS = {
    "a": torch.arange(3).to(torch.bfloat16),  # 6 bytes: what follows is not aligned
    "b": torch.randn(2, 5),
    "c": torch.randn(7, dtype=torch.float64),
    "d": torch.randn(1, 1, 3).half(),
}


def test_a_bucket_of_sglangs_class_packed_without_gaps(metadata_class: type) -> None:
    found = read_bucket(encode(flattened(WEIGHTS, metadata_class)), "flattened_bucket")
    assert list(found) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor)


@pytest.mark.parametrize("protocol", range(3, 6))
def test_a_list_of_named_tensors_of_any_protocol(protocol: int) -> None:
    content = [(name, torch.nn.Parameter(tensor)) for name, tensor in WEIGHTS.items()]
    found = read_bucket(base64.b64encode(pickle.dumps(content, protocol)).decode(), None)
    assert all(found[name].equal(tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize(
    "name", ["builtins.eval", "os.system", "torch.load", "torch.hub.load", "torch.storage.io.open"]
)
def test_a_global_beside_the_list_is_refused_by_name(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    payload = base64.b64encode(f"c{module}\n{attribute}\n.".encode()).decode()
    with pytest.raises(EngineError, match=f"global {name} is not on the allow-list"):
        read_bucket(payload, None)


def test_a_dotted_name_does_not_reach_through_an_allowed_one() -> None:
    """Protocol 4 resolves dotted names: torch.Tensor.__init__.__globals__ is none of the list."""
    name = b"Tensor.__init__.__globals__"
    body = b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name + b"\x93."
    with pytest.raises(EngineError, match="allow-list"):
        read_bucket(base64.b64encode(body).decode(), None)


def test_damage_is_an_engine_error_whatever_it_hits(metadata_class: type) -> None:
    good = pickle.dumps(flattened(WEIGHTS, metadata_class))
    rng = random.Random(0)
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        if rng.random() < 0.3:
            del bad[rng.randrange(len(bad)) :]
        try:
            found = read_bucket(base64.b64encode(bytes(bad)).decode(), "flattened_bucket")
        except EngineError:
            continue
        assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())


@pytest.mark.parametrize(
    ("content", "load_format", "words"),
    [
        ({"a": 1}, None, "list of"),
        ([("a", 1)], None, "list of"),
        ([("a", torch.ones(1), 2)], None, "list of"),
        ({"metadata": []}, "flattened_bucket", "flattened_tensor"),
        ({"flattened_tensor": torch.ones(4), "metadata": []}, "flattened_bucket", "float32, not uint8"),
        ({"flattened_tensor": torch.ones(4, dtype=torch.uint8), "metadata": [1]}, "flattened_bucket", "malformed"),
        ([], "direct", "'direct' is not supported"),
    ],
)
def test_another_content_is_refused(content: object, load_format: str | None, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        read_bucket(encode(content), load_format)
