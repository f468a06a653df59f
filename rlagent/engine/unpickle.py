"""Reading weight buckets in SGLang's own format: a pickle, through an exact allow-list of globals.

What SGLang's MultiprocessingSerializer emits on a CPU (read from 0.5.21, `utils/common.py`): ForkingPickler with torch's reductions
registered by torch.multiprocessing would hand over a file descriptor; a plain pickle carries the storage inline as
`torch.storage._load_from_bytes(bytes)`. SGLang's unpickler takes the latter and loads the bytes with weights_only=True; so do we.
On CUDA the tensor arrives as torch.multiprocessing.reductions.rebuild_cuda_tensor with an IPC handle.
Invariant: nothing outside the list is ever imported or called.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pybase64
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlagent.errors import EngineError


@dataclass
class FlattenedTensorMetadata:
    """Stands for sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata; indices count bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


_DEVICE: Final = 6  # the argument of rebuild_cuda_tensor that names a GPU: an index, or a UUID as SGLang reads it
_DTYPES: Final = ("bfloat16", "float16", "float32", "float64", "uint8", "int32", "int64", "bool", "float8_e4m3fn")
_ALLOWED: Final = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.nn.parameter", "Parameter"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "UntypedStorage"),
        ("torch", "Tensor"),
    }
    | {("torch", name) for name in _DTYPES}
)


_rebuild: Final[Callable[..., Any]] = rebuild_cuda_tensor


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if (module, name) == ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"):
            return FlattenedTensorMetadata
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return _rebuild_cuda
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"global {module}.{name} is not on the allow-list of weight payloads")


def _rebuild_cuda(*arguments: Any) -> Any:
    here = (own_device(arguments[_DEVICE], _uuids()),)
    return _rebuild(*arguments[:_DEVICE], *here, *arguments[_DEVICE + 1 :])


def own_device(named: int | str, uuids: list[str]) -> int:
    """The index here of a GPU that the sender named by its UUID. UnpicklingError where this process does not see it."""
    if isinstance(named, int):
        return named
    if named not in uuids:
        raise pickle.UnpicklingError(f"no GPU here has the UUID {named}")
    return uuids.index(named)


def _uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _load_storage(data: bytes) -> Any:
    storage = torch.load(io.BytesIO(data), weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage | torch.UntypedStorage):
        raise pickle.UnpicklingError(f"expected a torch storage, got {type(storage).__name__}")
    return storage


def read_bucket(payload: object, load_format: str | None) -> dict[str, torch.Tensor]:
    """One rank's base64 payload as tensors by name. EngineError when it is not what it should be."""
    try:
        content = _Unpickler(io.BytesIO(pybase64.b64decode(str(payload), validate=True))).load()
    except Exception as error:  # the boundary: damaged bytes make a pickle raise nearly anything
        raise EngineError(f"serialized_named_tensors cannot be read: {error}") from error
    if load_format is None:
        if not isinstance(content, list) or not all(_is_named(item) for item in content):
            raise EngineError("serialized_named_tensors without load_format must hold a list of (name, tensor)")
        # A CUDA handle is closed by its sender after the answer, so what it maps is copied now; a bucket is copied anyway.
        return {name: tensor.clone() if tensor.is_cuda else tensor for name, tensor in content}
    if load_format != "flattened_bucket":
        raise EngineError(f"load_format {load_format!r} is not supported; use null or 'flattened_bucket'")
    try:
        return split_bucket(content["flattened_tensor"], content["metadata"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise EngineError(f"flattened bucket is malformed: {type(error).__name__}: {error}") from error


def split_bucket(flat: torch.Tensor, metadata: list[FlattenedTensorMetadata]) -> dict[str, torch.Tensor]:
    """The tensors that a flat uint8 buffer holds."""
    if flat.dtype != torch.uint8:
        raise TypeError(f"flattened_tensor has dtype {flat.dtype}, not uint8")
    # A copy of each: SGLang packs without alignment, and a view of a wider dtype needs it.
    return {m.name: flat[m.start_idx : m.end_idx].clone().view(m.dtype).reshape(m.shape) for m in metadata}


def _is_named(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) and torch.is_tensor(item[1])
