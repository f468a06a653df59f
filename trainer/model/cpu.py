"""Lets megatron-core run on a machine without CUDA. One file, every patch with its reason; does nothing where CUDA
is present.

Called once by `rlagent.trainer.model.megatron` after it has imported the parts of megatron-core that we use. `torch`
itself stays as it is for everybody else (a global wrap corrupts transformers): inside megatron's modules the name
`torch` becomes a proxy, and the two methods of Tensor that cannot be reached that way answer differently to megatron
only.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

CPU: Final = torch.device("cpu")
FACTORIES: Final = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like")
"""What megatron calls with device="cuda" or pin_memory=True: counters, grad norms, grad buffers."""


class _Stream:
    """Stands for CUDA streams and events, which order work that on a CPU is already in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def wait_stream(self, *_: object) -> None: ...

    wait_event = synchronize = record = wait = wait_stream


class _Cuda:
    """`torch.cuda` as megatron's modules see it: one device, which is the CPU."""

    Stream = Event = _Stream

    @staticmethod
    def current_device() -> torch.device:
        return CPU

    @staticmethod
    def synchronize(*_: object) -> None: ...

    empty_cache = synchronize

    @staticmethod
    def current_stream(*_: object) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @staticmethod
    def stream(*_: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _Torch:
    """The name `torch` inside megatron's modules."""

    cuda = _Cuda()

    def __init__(self) -> None:
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _called_by_megatron(part: str) -> bool:
    """Whether the method that asks was called from a module under megatron.core's `part`."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(f"megatron.core{part}")


def _patch_tensor_methods() -> None:
    original_type = torch.Tensor.type
    original_cuda = torch.Tensor.cuda

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The gradient clipping asserts that gradients are torch.cuda.FloatTensor."""
        answer = original_type(self, *args, **kwargs)
        if isinstance(answer, str) and _called_by_megatron(".optimizer"):
            return answer.replace("torch.", "torch.cuda.")
        return answer

    def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tied embeddings of two pipeline stages are moved with .cuda() before their first all-reduce."""
        return self if _called_by_megatron("") else original_cuda(self, *args, **kwargs)

    torch.Tensor.type = tensor_type  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = tensor_cuda  # type: ignore[method-assign, assignment]


def _as_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What the dispatcher of experts' tokens reads on the host."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def install() -> None:
    """Swap `torch` in megatron's loaded modules. Call once, after they are imported."""
    if torch.cuda.is_available():
        return
    proxy = _Torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]
    _patch_tensor_methods()
    # It converts to numpy only what it moves from a GPU, but what calls it reads sizes as numpy.
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = _as_asked  # type: ignore[attr-defined]
    # A hint about CUDA's queues, given once by every process.
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True


def install_rng() -> None:
    """Make megatron's CUDA random states harmless. Call after its groups are initialised.

    The inference tracker's fork() does nothing, which is right without dropout: sequence parallelism enters it.
    Activation recompute saves and restores the "CUDA" state around each layer.
    """
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
