"""Low-rank adapters (LoRA, arXiv 2106.09685, eq. 3): the base is frozen; of W + scale B A only A and B are trained.

In the flow: the learner installs them on its policy before the optimizer is made. A linear layer's weight is merged anew before each of
its forward passes, in fp32 and then cast, by the same function that publishes it: the policy that is trained is bit for bit the one
that engines get. Adapters are whole on every tensor-parallel rank, which cuts their product; so they load under any layout.
Experts have adapters of their own, which stand where they stand and are not cut.
Invariant: the base never changes; all ranks that hold a matrix hold equal adapters of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from rlagent.trainer.config import LoraConfig
from rlagent.trainer.model import megatron
from rlagent.trainer.model.architecture import Architecture
from rlagent.trainer.model.build import Policy, chunks_of
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.weight_map import Rule, shapes, split

NAME: Final = "base_model.model."
"""Before the Hugging Face name of an adapter's matrix, as in PEFT's files."""
_LINEAR: Final = ("qkv", "columns", "gate_up")


class _Adapter(nn.Module):
    """Of one of megatron's linear layers: A [rank, in] and B [out, rank] of each Hugging Face matrix in it that is a target."""

    def __init__(
        self, arch: Architecture, rule: Rule, weight: Tensor, plan: ParallelPlan, config: LoraConfig, seed: int
    ) -> None:
        super().__init__()
        self._arch, self._rule, self._plan = arch, rule, plan
        self._scale = config.alpha / config.rank
        self._shapes = shapes(arch, rule)
        self.adapted = [number for number, name in enumerate(rule.hf) if _target(name) in config.targets]
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for number in self.adapted:
            rows, columns = self._shapes[number]
            # A begins as torch's linear layers do, the same on every rank of every layout; B at 0, so that training begins at the base.
            draw = torch.Generator().manual_seed(seed + zlib.crc32(rule.hf[number].encode()))
            bound = 1 / math.sqrt(columns)
            a = torch.empty(config.rank, columns).uniform_(-bound, bound, generator=draw)
            self.a.append(nn.Parameter(a.to(weight)))
            self.b.append(nn.Parameter(weight.new_zeros(rows, config.rank)))
        if rule.expert >= 0:
            for matrix in self.parameters():
                # As megatron marks an expert's own weights: gradients are summed over the ranks that hold the expert, and every rank
                # counts its experts in the gradient's norm.
                matrix.allreduce = False  # type: ignore[attr-defined]
                megatron.tensor_parallel.set_tensor_model_parallel_attributes(matrix, is_parallel=True, dim=0, stride=1)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each matrix by its name in PEFT's files."""
        for number, a, b in zip(self.adapted, self.a, self.b, strict=True):
            stem = NAME + self._rule.hf[number].removesuffix("weight")
            yield f"{stem}lora_A.weight", a
            yield f"{stem}lora_B.weight", b

    def merged(self, base: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """This rank's shard of base + scale B A, of the base's dtype; differentiable in A and B, whose gradients are summed over shards."""
        a, b = ([self._shared(matrix).float() for matrix in matrices] for matrices in (self.a, self.b))
        cut = {"size": self._plan.config.tensor, "rank": self._plan.tensor_rank}
        if self._rule.kind == "columns":
            left, right = b[0], split(self._arch, self._rule, a, **cut)
        else:
            # Matrices that megatron fuses: each B's columns meet its own A alone.
            rank, blocks = a[0].shape[0], len(a)
            wide = [base.new_zeros(rows, blocks * rank, dtype=torch.float32) for rows, _ in self._shapes]
            for block, (number, matrix) in enumerate(zip(self.adapted, b, strict=True)):
                wide[number] = pad(matrix, (block * rank, (blocks - 1 - block) * rank))
            left, right = split(self._arch, self._rule, wide, **cut), torch.cat(a)
        return (base.float() + (left @ right) * self._scale).to(base.dtype)

    def _shared(self, matrix: Tensor) -> Tensor:
        if self._rule.cuts(self._plan.config.tensor) == 1:
            return matrix
        whole: Tensor = megatron.tensor_parallel.copy_to_tensor_model_parallel_region(
            matrix, group=self._plan.tensor_group
        )
        return whole


class Adapters:
    """All adapters of this rank's part of a policy."""

    def __init__(
        self, policy: Policy, local: Mapping[Rule, Tensor], plan: ParallelPlan, config: LoraConfig, *, seed: int
    ) -> None:
        """local: the policy's parameters by their rules. They are frozen."""
        first = chunks_of(policy)[0]
        self._by_rule: dict[Rule, _Adapter] = {}
        self._on = True
        policy.requires_grad_(False)
        holders = {
            id(module.weight): module
            for module in policy.modules()
            if isinstance(getattr(module, "weight", None), nn.Parameter)
        }
        for rule, weight in local.items():
            linear = rule.kind in _LINEAR and rule.place == "layer" and rule.hf[0].endswith(".weight")
            if not linear or not any(_target(name) in config.targets for name in rule.hf):
                continue
            adapter = _Adapter(first.architecture, rule, weight, plan, config, seed)
            self._by_rule[rule] = adapter
            self._attach(holders[id(weight)], adapter)
        if plan.is_first_stage:
            # Recomputed layers give gradients only where their input asks for one, and a frozen embedding's does not.
            first.embedding.register_forward_hook(lambda *call: call[2].requires_grad_(torch.is_grad_enabled()))

    def _attach(self, module: Any, adapter: _Adapter) -> None:
        """Let the layer see the merged weight while it runs: an attribute of the instance hides the parameter."""
        base = module.weight
        module.adapter = adapter

        def merge(*_: object) -> None:
            if self._on:
                module.__dict__["weight"] = adapter.merged(base)

        def leave(*_: object) -> None:
            module.__dict__.pop("weight", None)

        module.register_forward_pre_hook(merge)
        module.register_forward_hook(leave)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the policy is its base."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def parameters(self) -> dict[Rule, Tensor]:
        """What is trained, by what a checkpoint calls it."""
        return {
            Rule(
                local=(), hf=(name,), kind="replicated", place="layer", layer=rule.layer, expert=rule.expert
            ): parameter
            for rule, adapter in self._by_rule.items()
            for name, parameter in adapter.named()
        }

    @torch.no_grad()
    def published(self, rule: Rule, parameter: Tensor) -> Tensor:
        """This rank's shard of a parameter as engines get it."""
        adapter = self._by_rule.get(rule)
        return parameter if adapter is None else adapter.merged(parameter)


def _target(name: str) -> str:
    """`q_proj` of model.layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2]


def base_fingerprint(model_dir: Path) -> str:
    """Of the weights on disk that adapters are adapters of: a checkpoint holds this in their stead."""
    found = hashlib.sha256()
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
