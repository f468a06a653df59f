"""SGLang's wire format of a weight bucket, written without sglang installed. The only place that pickles under its module name.

SGLang 0.5.21 reads the payload of /update_weights_from_tensor with an unpickler that knows an exact list of globals
(SafeUnpickler, srt/utils/common.py). A plain pickle of a CPU tensor names torch._utils._rebuild_tensor_v2 and
torch.storage._load_from_bytes, which it takes; a ForkingPickler would send a file descriptor instead, which cannot travel
over HTTP. On CUDA the ForkingPickler sends an IPC handle.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import pybase64
import torch
import torch.multiprocessing  # registers the CUDA IPC reductions with ForkingPickler

from rlagent.trainer.weight_sync.cuda_ipc import name_device, uuid_of

_MODULE: Final = "sglang.srt.weight_sync.tensor_bucket"
_NAME: Final = "FlattenedTensorMetadata"
_BETWEEN: Final = b'","'
_PIECE_BYTES: Final = 3 * 2**18  # a multiple of three: base64 of the pieces is the base64 of the whole


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor lies in a flat uint8 buffer: bytes [start_idx, end_idx). SGLang's FlattenedTensorMetadata."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int  # in bytes, as SGLang counts it


class _SglangPickler(pickle._Pickler):  # the C pickler cannot rename a class
    """Writes a TensorSlot as an instance of SGLang's class of the same fields."""

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        """Object by object; a slot becomes object.__new__(cls) with its fields as state."""
        write: Callable[[bytes], None] = self.write  # type: ignore[attr-defined]
        save: Callable[[Any, bool], None] = super().save  # type: ignore[misc]
        if not isinstance(value, TensorSlot):
            save(value, save_persistent_id)
            return
        write(pickle.GLOBAL + f"{_MODULE}\n{_NAME}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        save(dict(vars(value)), True)
        write(pickle.BUILD)


def pickle_bucket(flat: torch.Tensor, slots: Sequence[TensorSlot]) -> memoryview:
    """A pickle of {"flattened_tensor": flat uint8, "metadata": [...]}, for load_format "flattened_bucket"."""
    buffer = io.BytesIO()
    pickler = _SglangPickler(buffer, protocol=4)
    if flat.is_cuda:
        reductions = dict(ForkingPickler(io.BytesIO()).dispatch_table)
        reduce: Callable[[torch.Tensor], Any] = reductions[torch.Tensor]
        reductions[torch.Tensor] = lambda tensor: name_device(reduce(tensor), uuid_of)
        pickler.dispatch_table = reductions
    pickler.dump({"flattened_tensor": flat, "metadata": list(slots)})
    return buffer.getbuffer()


def serialize_bucket(flat: torch.Tensor, slots: Sequence[TensorSlot]) -> str:
    """The pickle in base64: one entry of `serialized_named_tensors`."""
    return pybase64.b64encode(pickle_bucket(flat, slots)).decode()


def update_body(pickled: memoryview, ranks: int) -> tuple[int, Iterator[bytes]]:
    """The JSON of /update_weights_from_tensor: its size, and its pieces. The same bucket for each of so many ranks.

    It never stands in memory as a whole: base64, text and JSON of a bucket would each be another copy of it.
    """
    head = b'{"load_format":"flattened_bucket","flush_cache":false,"serialized_named_tensors":["'
    end = b'"]}'
    size = len(head) + ranks * 4 * -(-len(pickled) // 3) + (ranks - 1) * len(_BETWEEN) + len(end)

    def pieces() -> Iterator[bytes]:
        yield head
        for rank in range(ranks):
            if rank:
                yield _BETWEEN
            for start in range(0, len(pickled), _PIECE_BYTES):
                yield pybase64.b64encode(pickled[start : start + _PIECE_BYTES])
        yield end

    return size, pieces()
