"""Weights from a Hugging Face directory: safetensors, sharded or not."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlagent.engine.model import Model
from rlagent.errors import LoadError
from rlagent.kernels.quantize import FLOAT8


def load_checkpoint(model: Model, model_dir: Path) -> None:
    """Copy a directory's weights into the model. LoadError, before anything is changed, if a tensor is missing or misshapen."""
    found = dict(read_weights(model_dir))
    check_names(model, found, complete=True, where=str(model_dir))
    model.load(found)


def read_weights(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model directory, on the CPU. LoadError names a file that is missing or broken."""
    for file in _weight_files(model_dir):
        path = model_dir / file
        if not path.is_file():
            raise LoadError(
                f"model directory {str(model_dir)!r} has no {file}; the engine loads safetensors checkpoints"
            )
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path} cannot be read: {error}") from error


def _weight_files(model_dir: Path) -> list[str]:
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is not an index of weight files ({type(error).__name__}: {error})") from error


def check_names(model: Model, found: dict[str, torch.Tensor], *, complete: bool, where: str) -> None:
    """Check names and shapes against the model. LoadError names the first that does not fit.

    A tied head that a checkpoint stores all the same is left out of `found`.
    """
    named = model.stored_by_name()
    if model.architecture.tied:
        found.pop("lm_head.weight", None)
    for name, tensor in found.items():
        if name not in named:
            raise LoadError(f"{where}: tensor {name!r} is not one of this {model.architecture.family}")
        if tensor.shape != named[name].shape:
            raise LoadError(
                f"{where}: tensor {name!r} has shape {tuple(tensor.shape)}, the model's is {tuple(named[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise LoadError(f"{where}: tensor {name!r} has dtype {tensor.dtype}; weights are floating point")
        if (tensor.dtype == FLOAT8) != (named[name].dtype == FLOAT8):
            raise LoadError(
                f"{where}: tensor {name!r} has dtype {tensor.dtype}, the model's is {named[name].dtype}, by the quantization_config of "
                "the config.json that the engine was started with"
            )
    missing = next((name for name in named if name not in found), None) if complete else None
    if missing is not None:
        raise LoadError(f"{where}: tensor {missing!r} is missing")
