"""Weights in and out of the learner: from a Hugging Face directory, to full tensors on rank 0, to a directory
transformers loads.

Every rank walks the same list of rules (`rlagent.trainer.weight_map`) in the same order, so collectives and sends
pair up.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlagent.errors import LoadError
from rlagent.fp8 import SCALE, Fp8Blocks, stored
from rlagent.kernels.quantize import FLOAT8
from rlagent.trainer.model.architecture import Architecture, read_config
from rlagent.trainer.model.build import Policy, stage_layers
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.weight_map import LOCAL_EXPERT, Rule, join, rules, shapes, split

_FILE_MODE: Final = 0o666
MAX_SHARD_BYTES: Final = 5 * 10**9
"""Size at which a new safetensors file is begun; the Hub's own habit."""
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def stages_of(arch: Architecture, rule: Rule, num_stages: int, num_chunks: int) -> list[int]:
    """The pipeline stages, of num_chunks chunks each, that hold a rule's parameter; the first is the one that exports it. Tied
    embeddings stand on two.
    """
    last = num_stages - 1
    if rule.place == "embedding":
        return [0, last] if arch.tied and last else [0]
    if rule.place == "layer":
        return [_part_of(arch, rule, num_stages * num_chunks)[0] % num_stages]
    return [last]


def _part_of(arch: Architecture, rule: Rule, num_parts: int) -> tuple[int, int]:
    """Which of the parts that the layers are cut into has a rule's layer, and its number in it. Stages take parts in turn."""
    for part, layers in enumerate(stage_layers(arch.num_layers, num_parts)):
        if rule.layer in layers:
            return part, rule.layer - layers.start
    raise AssertionError(f"layer {rule.layer} of {arch.num_layers}")


def expert_rank_of(arch: Architecture, rule: Rule, num_parts: int) -> int:
    """Which of `num_parts` parts of the experts holds an expert's rule."""
    assert arch.experts is not None
    return rule.expert // (arch.experts.count // num_parts)


def local_parameters(model: Policy, arch: Architecture, plan: ParallelPlan) -> dict[Rule, Tensor]:
    """This rank's parameters, by the rules that describe them, in the rules' order."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    found: dict[Rule, Tensor] = {}
    for rule in rules(arch):
        names = _local_names(arch, rule, plan)
        matches = [named[name] for name in names if name in named]
        assert len(matches) == min(1, len(names)), f"{names} in {sorted(named)}"
        if matches:
            found[rule] = matches[0]
    return found


def _local_names(arch: Architecture, rule: Rule, plan: ParallelPlan) -> tuple[str, ...]:
    """What a rule's parameter may be called on this rank; nothing if it is not here."""
    stages, chunks = plan.config.pipeline, plan.config.virtual_pipeline
    if plan.pipeline_rank not in stages_of(arch, rule, stages, chunks):
        return ()
    names = rule.local
    if rule.expert >= 0:
        assert arch.experts is not None
        if expert_rank_of(arch, rule, plan.config.expert) != plan.expert_rank:
            return ()
        number = rule.expert % (arch.experts.count // plan.config.expert)
        names = tuple(name.replace(LOCAL_EXPERT, str(number)) for name in names)
    chunk = 0 if rule.place == "embedding" else chunks - 1
    if rule.place == "layer":
        part, number = _part_of(arch, rule, stages * chunks)
        chunk = part // stages
        names = tuple(f"decoder.layers.{number}.{name}" for name in names)
    elif rule.place == "embedding" and not plan.is_first_stage:
        chunk, names = chunks - 1, ("output_layer.weight",)
    return names if chunks == 1 else tuple(f"chunks.{chunk}.{name}" for name in names)


class _Directory:
    """The tensors of a Hugging Face directory, read one at a time."""

    def __init__(self, model_dir: Path) -> None:
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            raise LoadError(f"{model_dir} has no *.safetensors; convert the model to safetensors first")
        self.model_dir = model_dir
        self.fp8 = Fp8Blocks.of(read_config(model_dir))
        self.files: dict[str, Any] = {}
        try:
            for path in files:
                opened = safe_open(path, framework="pt")
                self.files |= dict.fromkeys(opened.keys(), opened)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path} cannot be read: {error}") from error

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise LoadError(f"{self.model_dir}: {name!r} is {tuple(tensor.shape)}, but config.json makes it {shape}")
        if self.fp8 is not None and self.fp8.holds(name):
            return self.fp8.whole(name, tensor, self._tensor(name + SCALE))
        if tensor.dtype == FLOAT8:
            raise LoadError(
                f"{self.model_dir}: {name!r} is {FLOAT8}, and quantization_config of config.json does not hold it"
            )
        return tensor

    def _tensor(self, name: str) -> Tensor:
        if name not in self.files:
            raise LoadError(f"{self.model_dir} has no tensor {name!r}, which its config.json calls for")
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor


def load_hf(model: Policy, arch: Architecture, model_dir: Path, plan: ParallelPlan) -> None:
    """Set every parameter of this rank from a Hugging Face directory. Raises LoadError for a missing or misshapen
    tensor.
    """
    directory = _Directory(model_dir)
    unset = {id(parameter) for parameter in model.parameters()}
    for rule, parameter in local_parameters(model, arch, plan).items():
        tensors = [directory.read(name, shape) for name, shape in zip(rule.hf, shapes(arch, rule), strict=True)]
        shard = split(arch, rule, tensors, size=plan.config.tensor, rank=plan.tensor_rank)
        with torch.no_grad():
            parameter.copy_(shard)
        unset.discard(id(parameter))
    assert not unset, "a parameter of the model has no rule"


def _gather(parameter: Tensor, rule: Rule, plan: ParallelPlan) -> list[Tensor]:
    """The parameter's shards of all tensor-parallel ranks, as far as they differ."""
    own = parameter.detach().contiguous()
    if rule.cuts(plan.config.tensor) == 1:
        return [own]
    shards = [torch.empty_like(own) for _ in range(plan.config.tensor)]
    dist.all_gather(shards, own, group=plan.tensor_group)
    return shards


def _as_it_is(_: Rule, parameter: Tensor) -> Tensor:
    return parameter


def export(
    model: Policy,
    arch: Architecture,
    plan: ParallelPlan,
    dtype: torch.dtype | None = None,
    published: Callable[[Rule, Tensor], Tensor] = _as_it_is,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) in a fixed order on rank 0; other ranks yield nothing but must be drained.

    `published` makes what is exported of each of this rank's parameters (adapters are merged into it). The tensors may share memory with
    the model unless a dtype other than its own is asked for.
    """
    if not (plan.is_replica_leader or plan.is_expert_leader):
        return
    model_dtype = next(model.parameters()).dtype
    local = local_parameters(model, arch, plan)
    for rule in rules(arch):
        stage = stages_of(arch, rule, plan.config.pipeline, plan.config.virtual_pipeline)[0]
        sender = plan.stage_leader(stage)
        holds = plan.pipeline_rank == stage and plan.is_replica_leader
        if rule.expert >= 0:
            sender = plan.expert_leader(stage, expert_rank_of(arch, rule, plan.config.expert))
            holds = plan.rank == sender
        tensors: list[Tensor] = []
        if holds:
            own = published(rule, local[rule])
            tensors = [tensor.contiguous() for tensor in join(arch, rule, _gather(own, rule, plan))]
        if sender and plan.rank == sender:
            for tensor in tensors:
                dist.send(tensor, dst=0)
        if plan.rank:
            continue
        if sender:
            tensors = [torch.empty(shape, dtype=model_dtype, device=plan.device) for shape in shapes(arch, rule)]
            for tensor in tensors:
                dist.recv(tensor, src=sender)
        for name, tensor in zip(rule.hf, tensors, strict=True):
            yield name, tensor if dtype is None else tensor.to(dtype)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def _write_shards(named: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """model.safetensors, or model-00001-of-0000n.safetensors with an index."""
    parts: list[Path] = []
    index: dict[str, int] = {}
    total = pending_bytes = 0
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        path = directory / f"part-{len(parts)}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        path.chmod(_FILE_MODE & ~_umask())  # safetensors' own files are for their owner alone
        index.update(dict.fromkeys(pending, len(parts)))
        parts.append(path)
        pending.clear()

    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > MAX_SHARD_BYTES:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().clone()
        pending_bytes += size
        total += size
    flush()
    if len(parts) == 1:
        parts[0].rename(directory / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
    for path, file_name in zip(parts, names, strict=True):
        path.rename(directory / file_name)
    weight_map = {name: names[part] for name, part in index.items()}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


def write_hf(named: Iterable[tuple[str, Tensor]], source_dir: Path, directory: Path) -> None:
    """Write tensors as a Hugging Face directory; config, tokenizer and the rest are the source model's, with the
    dtype corrected. Where the source's weights are float8 blocks, so are these: it is what its engines load.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fp8 = Fp8Blocks.of(read_config(source_dir))
    dtypes: set[torch.dtype] = set()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            dtypes.add(tensor.dtype)
            yield name, tensor

    _write_shards(stored(fp8, watched()), directory)
    copy_model_files(source_dir, directory, dtypes.pop())


def copy_model_files(source_dir: Path, directory: Path, dtype: torch.dtype) -> None:
    """Config, tokenizer and whatever else is not weights; the config says the dtype."""
    for path in sorted(source_dir.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    config = read_config(source_dir)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
