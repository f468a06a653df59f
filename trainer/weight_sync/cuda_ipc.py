"""CUDA memory handles between learner and engine: what must hold for them, and the one thing in them that is rewritten.

In the flow: the tensor transport shares a bucket's memory with engines on the same GPU. A handle names its GPU by an index, which
is another one where the two processes see other GPUs (CUDA_VISIBLE_DEVICES); so it travels as the GPU's UUID, which SGLang
(srt/utils/patch_torch.py) and the embedded engine turn into their own index.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from rlagent.errors import WeightSyncError

DEVICE_ARGUMENT: Final = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
_ALLOCATOR_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def refuse_expandable_segments(environ: Mapping[str, str]) -> None:
    """WeightSyncError where the allocator makes memory that no handle can share."""
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in environ.get(name, "").replace(" ", "").lower():
            raise WeightSyncError(
                f"{name} = {environ[name]!r}: memory of expandable segments cannot be shared with an engine; "
                "take expandable_segments out of it, or set sync.transport = 'distributed'"
            )


def name_device(reduced: tuple[Any, ...], uuid_of: Callable[[int], str]) -> tuple[Any, ...]:
    """What torch reduces a CUDA tensor to, with the UUID of its GPU in place of the index."""
    rebuild, arguments, *rest = reduced
    device = arguments[DEVICE_ARGUMENT]
    named = (*arguments[:DEVICE_ARGUMENT], uuid_of(device), *arguments[DEVICE_ARGUMENT + 1 :])
    return (rebuild, named, *rest)


def uuid_of(device: int) -> str:
    """The UUID of a GPU that this process sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def explain(error: WeightSyncError) -> WeightSyncError:
    """An engine's refusal of a handle, with what may be done about it where the reason is known."""
    text = str(error)
    if "future version" in text:
        return WeightSyncError(
            f"{text}: learner and engine have different versions of torch (here {torch.__version__}), whose memory handles "
            "differ; install the same minor version on both sides, or set sync.transport = 'distributed'"
        )
    if "device_uuid" in text or "no GPU here" in text:
        return WeightSyncError(
            f"{text}: the engine does not see the learner's GPU; put both on one, or set sync.transport = 'distributed'"
        )
    return error
