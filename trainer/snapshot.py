"""The learner's state on disk: one safetensors file for each tensor- and pipeline-parallel rank, and one for each part of a stage's
experts, under one manifest.

In the flow: the learner's `save` copies its state and goes on; threads write the files; `finish` gives the whole its name. Tensors are
named by what they are in the Hugging Face model, so that any layout loads what any other saved: a rank reads the shards of a
parameter, joins and cuts them again (`rlagent.trainer.weight_map`).
Invariant: what is loaded is, bit for bit, what was saved; a save that did not end is never loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlagent.errors import CheckpointError
from rlagent.trainer import checkpoint
from rlagent.trainer.model.architecture import Architecture
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.sharded_state import MOMENTS, STEP
from rlagent.trainer.weight_map import Rule, join, split
from rlagent.trainer.weights import expert_rank_of, stages_of

RNG_TENSOR: Final = "rng/torch"
# By rule, each local parameter's weights, moments and step.
States = Mapping[Rule, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A save that is being written."""

    directory: Path
    written: Future[list[checkpoint.FileRecord]] | None  # on ranks that write
    manifest: checkpoint.Manifest  # without its files


class SnapshotWriter:
    """Writes saves beside the training, one at a time. Every method is called on all ranks in the same order."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None

    def begin(
        self,
        directory: Path,
        states: States,
        *,
        step: int,
        model: Mapping[str, Any],
        config_digest: str,
        extra: Mapping[str, Any],
    ) -> None:
        """Copy the state and start to write it; what was begun before is finished first."""
        self.finish()
        manifest = checkpoint.Manifest(
            step=step, layout=_layout(self._plan), model=model, config_digest=config_digest, files=(), extra=extra
        )
        if self._plan.rank == 0:
            checkpoint.write_manifest(checkpoint.begin(directory), manifest)  # refuses an `extra` that is no JSON
        dist.barrier()
        files = self._files(states)
        written = None
        if files:
            partial = checkpoint.partial_directory(directory)
            written = self._thread.submit(_write, {partial / name: tensors for name, tensors in files.items()})
        self._pending = _Pending(directory=directory, written=written, manifest=manifest)

    def _files(self, states: States) -> dict[str, dict[str, Tensor]]:
        """What this rank writes: its copies by file and name."""
        plan = self._plan
        found: dict[str, dict[str, Tensor]] = {}
        if plan.is_replica_leader:
            found[_shard_name(plan.tensor_rank, plan.pipeline_rank)] = {RNG_TENSOR: torch.get_rng_state()}
        if plan.is_expert_leader and any(rule.expert >= 0 for rule in states):
            found[_expert_name(plan.expert_rank, plan.pipeline_rank)] = {}
        for rule, state in states.items():
            shard = _shard_name(plan.tensor_rank, plan.pipeline_rank)
            file = found.get(shard if rule.expert < 0 else _expert_name(plan.expert_rank, plan.pipeline_rank))
            if file is not None:
                copies = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in state.items()}
                file |= {f"{_key(rule)}/{key}": copy for key, copy in copies.items()}
        return found

    def finish(self, *, wait: bool = True) -> Path | None:
        """Give a save that is written its name, and answer that; None if there is none, or (without `wait`) it is not written yet."""
        pending = self._pending
        if pending is None:
            return None
        ready = wait or pending.written is None or pending.written.done()
        if not wait and not all(self._gather(ready)):
            return None
        self._pending = None
        failure: BaseException | None = None
        own = None
        if pending.written is not None:
            failure = pending.written.exception()
            own = None if failure else pending.written.result()
        found = self._gather(repr(failure) if failure else own)
        broken = [each for each in found if isinstance(each, str)]
        if broken:
            raise CheckpointError(f"{pending.directory} could not be written: {'; '.join(broken)}") from failure
        if self._plan.rank == 0:
            files = tuple(record for each in found if each is not None for record in each)
            whole = replace(pending.manifest, files=files)
            checkpoint.write_manifest(checkpoint.partial_directory(pending.directory), whole)
            checkpoint.commit(pending.directory)
        dist.barrier()
        return pending.directory

    def close(self) -> None:
        """End the thread. A save that was not finished has no name, and is removed by the next one of that name."""
        self._thread.shutdown(wait=True)
        self._pending = None

    def _gather(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self._plan.world_size
        dist.all_gather_object(found, own)
        return found


class SnapshotReader:
    """One checkpoint, opened by a rank of any layout. Raises CheckpointError for damage, and for another model."""

    def __init__(self, directory: Path, arch: Architecture, plan: ParallelPlan, *, model: Mapping[str, Any]) -> None:
        self.directory = directory
        self.manifest = checkpoint.read_manifest(directory)
        if self.manifest.model != model:
            both = {**self.manifest.model, **model}
            fields = sorted(key for key in both if self.manifest.model.get(key) != model.get(key))
            raise CheckpointError(
                f"{directory} is a checkpoint of another model or dtype than the one that is being trained: they differ in "
                f"{', '.join(fields)}"
            )
        self._arch, self._plan = arch, plan
        self._files: dict[str, Any] = {}

    def states(self, rules: Iterable[Rule]) -> dict[Rule, dict[str, Tensor]]:
        """This rank's part of what was saved for each rule."""
        return {rule: self._state(rule) for rule in rules}

    def rng_state(self) -> Tensor:
        """torch's RNG as this rank saved it; of the first rank, where the layout is another now."""
        same = self.manifest.layout == _layout(self._plan)
        name = _shard_name(self._plan.tensor_rank if same else 0, self._plan.pipeline_rank if same else 0)
        found: Tensor = self._file(name).get_tensor(RNG_TENSOR)
        return found

    def _state(self, rule: Rule) -> dict[str, Tensor]:
        layout = self.manifest.layout
        stage = stages_of(self._arch, rule, layout["pipeline"], layout["virtual_pipeline"])[0]
        if rule.expert >= 0:
            names = [_expert_name(expert_rank_of(self._arch, rule, layout["expert"]), stage)]
        else:
            names = [_shard_name(rank, stage) for rank in range(layout["tensor"])]
        files = [self._file(name) for name in names]
        saved = set(files[0].keys())
        keys = [key for key in ("param", *MOMENTS) if f"{_key(rule)}/{key}" in saved]
        if "param" not in keys:
            raise CheckpointError(f"{self.directory} has no weights of {_key(rule)!r}")
        return {key: self._tensor(rule, key, files) for key in keys}

    def _tensor(self, rule: Rule, key: str, files: Sequence[Any]) -> Tensor:
        name = f"{_key(rule)}/{key}"
        size, rank = self._plan.config.tensor, self._plan.tensor_rank
        whole: Tensor
        if key == STEP or rule.cuts(size) == rule.cuts(len(files)) == 1:
            whole = files[0].get_tensor(name)
        elif size == len(files):
            whole = files[rank].get_tensor(name)
        else:
            parts = join(self._arch, rule, [file.get_tensor(name) for file in files])
            whole = split(self._arch, rule, parts, size=size, rank=rank)
        return whole

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = checkpoint.checked_file(self.directory, self.manifest, name)
            self._files[name] = safe_open(path, framework="pt")
        return self._files[name]


def _shard_name(tensor_rank: int, pipeline_rank: int) -> str:
    return f"tensor{tensor_rank}-pipeline{pipeline_rank}.safetensors"


def _expert_name(expert_rank: int, pipeline_rank: int) -> str:
    return f"expert{expert_rank}-pipeline{pipeline_rank}.safetensors"


def _layout(plan: ParallelPlan) -> dict[str, int]:
    axes = ("tensor", "pipeline", "virtual_pipeline", "expert")
    return {axis: getattr(plan.config, axis) for axis in axes}


def _key(rule: Rule) -> str:
    """What a rule's parameter is called in a checkpoint: the first of the Hugging Face tensors that it is made of."""
    return rule.hf[0]


def _write(files: Mapping[Path, dict[str, Tensor]]) -> list[checkpoint.FileRecord]:
    for path, tensors in files.items():
        save_file(tensors, path)
    return [checkpoint.record(path) for path in files]
