"""SGLang's wire format of a weight bucket, written without sglang installed. The only place that pickles under its module name.

SGLang 0.5.21 reads the payload of /update_weights_from_tensor with an unpickler that knows an exact list of globals
(SafeUnpickler, srt/utils/common.py). A plain pickle of a CPU tensor names torch._utils._rebuild_tensor_v2 and
torch.storage._load_from_bytes, which it takes; a ForkingPickler would send a file descriptor instead, which cannot travel
over HTTP. On CUDA the ForkingPickler sends an IPC handle.
"""

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing  # registers the CUDA IPC reductions with ForkingPickler

_MODULE: Final = "sglang.srt.weight_sync.tensor_bucket"
_NAME: Final = "FlattenedTensorMetadata"


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


def serialize_bucket(flat: torch.Tensor, slots: Sequence[TensorSlot]) -> str:
    """base64 of {"flattened_tensor": flat uint8, "metadata": [...]}, for load_format "flattened_bucket"."""
    buffer = io.BytesIO()
    pickler = _SglangPickler(buffer, protocol=4)
    if flat.is_cuda:
        pickler.dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table
    pickler.dump({"flattened_tensor": flat, "metadata": list(slots)})
    return base64.b64encode(buffer.getvalue()).decode()
