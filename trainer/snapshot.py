"""The learner's state on disk: one safetensors file for each tensor- and pipeline-parallel rank, under one manifest.

Data- and context-parallel ranks hold the same state, so their number may change between save and load; tensor and pipeline may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlagent.errors import CheckpointError
from rlagent.trainer import checkpoint
from rlagent.trainer.parallel import ParallelPlan

RNG_TENSOR: Final = "rng/torch"


def _shard_name(plan: ParallelPlan) -> str:
    return f"tensor{plan.tensor_rank}-pipeline{plan.pipeline_rank}.safetensors"


def _layout(plan: ParallelPlan) -> dict[str, int]:
    return {"tensor": plan.config.tensor, "pipeline": plan.config.pipeline}


def write_snapshot(
    directory: Path,
    plan: ParallelPlan,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    model: Mapping[str, Any],
    config_digest: str,
    extra: Mapping[str, Any],
) -> None:
    """Called on all ranks; each writes its tensors and torch's RNG, and rank 0 gives the whole its name."""
    if plan.rank == 0:
        checkpoint.begin(directory)
    dist.barrier()
    written = None
    if plan.is_replica_leader:
        path = checkpoint.partial_directory(directory) / _shard_name(plan)
        own = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        save_file({**own, RNG_TENSOR: torch.get_rng_state()}, path)
        written = checkpoint.record(path)
    records: list[checkpoint.FileRecord | None] = [None] * plan.world_size
    dist.all_gather_object(records, written)
    if plan.rank == 0:
        manifest = checkpoint.Manifest(
            step=step,
            layout=_layout(plan),
            model=model,
            config_digest=config_digest,
            files=tuple(one for one in records if one is not None),
            extra=extra,
        )
        checkpoint.write_manifest(checkpoint.partial_directory(directory), manifest)
        checkpoint.commit(directory)
    dist.barrier()


def read_snapshot(
    directory: Path, plan: ParallelPlan, *, model: Mapping[str, Any]
) -> tuple[checkpoint.Manifest, dict[str, Tensor]]:
    """This rank's tensors; torch's RNG is set. Raises CheckpointError for damage, another model or another layout."""
    manifest = checkpoint.read_manifest(directory)
    if manifest.layout != _layout(plan):
        raise CheckpointError(
            f"{directory} was saved with parallel {dict(manifest.layout)}, not {_layout(plan)}; "
            "set parallel.tensor and parallel.pipeline as they were, or start from its Hugging Face export"
        )
    if manifest.model != model:
        raise CheckpointError(
            f"{directory} is a checkpoint of another model or dtype than the one that is being trained"
        )
    tensors = load_file(checkpoint.checked_file(directory, manifest, _shard_name(plan)))
    torch.set_rng_state(tensors.pop(RNG_TENSOR))
    return manifest, tensors
