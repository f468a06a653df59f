"""The pickles that carry buckets: what globals they name, and that their content is what went in."""

import base64
import json
import pickle
import pickletools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.engine.unpickle import read_bucket
from rlagent.trainer.weight_sync.buckets import make_buckets
from rlagent.trainer.weight_sync.sglang_pickle import serialize_bucket, update_body

METADATA = "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata"
# Of SafeUnpickler.ALLOWED_GLOBALS in SGLang 0.5.21, and of what its find_class takes besides, all that a CPU bucket needs.
SGLANG_TAKES = {
    METADATA, "collections OrderedDict", "torch Size", "torch._utils _rebuild_tensor_v2", "torch.storage _load_from_bytes",
    "torch float32", "torch float64", "torch bfloat16", "torch float16", "torch float8_e4m3fn", "torch uint8", "torch int64", "torch bool",
}  # fmt: skip
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int64,
    torch.bool,
]


def payload_of(weights: dict[str, torch.Tensor]) -> str:
    (bucket,) = make_buckets(weights.items(), 2**20)
    return serialize_bucket(bucket.flat, bucket.slots)


def globals_of(payload: str) -> set[str]:
    """Every global of a pickle, from its opcodes alone: nothing is loaded. STACK_GLOBAL takes the two strings before it."""
    found: set[str] = set()
    strings: list[str] = []
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(base64.b64decode(payload)):
        if opcode.name == "GLOBAL":
            found.add(str(argument))
        elif opcode.name == "STACK_GLOBAL":
            found.add(f"{strings[-2]} {strings[-1]}")
        elif opcode.name in ("INST", "EXT1", "EXT2", "EXT4"):
            found.add(opcode.name)
        elif isinstance(argument, str):
            strings.append(argument)
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else ""
        elif opcode.name in ("BINGET", "LONG_BINGET") and isinstance(argument, int):
            strings.append(memo[argument])
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_payload_names_only_what_sglang_takes(dtype: torch.dtype) -> None:
    named = globals_of(payload_of({"a": torch.zeros(2, 3, dtype=dtype), "scalar": torch.zeros((), dtype=dtype)}))
    assert named <= SGLANG_TAKES
    assert METADATA in named
    assert str(dtype).replace(".", " ") in named


def test_the_test_sees_what_it_would_refuse() -> None:
    hostile = base64.b64encode(pickle.dumps([print, torch.load])).decode()
    assert globals_of(hostile) == {"builtins print", "torch.serialization load"}


@given(
    st.dictionaries(st.text(min_size=1), st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)),
                    min_size=1, max_size=6)
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_payload_is_read_back_as_it_was(shapes: dict[str, tuple[list[int], torch.dtype]]) -> None:
    weights = {name: (10 * torch.randn(shape)).to(dtype) for name, (shape, dtype) in shapes.items()}
    found = read_bucket(payload_of(weights), "flattened_bucket")
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_a_payload_holds_one_buffer_and_not_each_tensor() -> None:
    small = len(base64.b64decode(payload_of({"a": torch.zeros(1000), "b": torch.zeros(1000)})))
    assert 8000 < small < 8000 + 3000


@pytest.mark.parametrize("num_bytes", [0, 1, 3 * 2**18 - 1, 3 * 2**18, 3 * 2**18 + 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_body_that_is_made_in_pieces_is_the_json_of_its_fields(num_bytes: int, ranks: int) -> None:
    pickled = memoryview(bytes(index % 251 for index in range(num_bytes)))
    size, pieces = update_body(pickled, ranks)
    body = b"".join(pieces)
    assert len(body) == size
    payload = base64.b64encode(pickled).decode()
    assert json.loads(body) == {
        "load_format": "flattened_bucket", "flush_cache": False, "serialized_named_tensors": [payload] * ranks
    }  # fmt: skip
