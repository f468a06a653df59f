"""AdamW around the learner's model, its learning-rate schedule, and its state as plain named tensors for
checkpoints.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.trainer import sharded_state
from rlagent.trainer.config import OptimizerConfig
from rlagent.trainer.model import megatron
from rlagent.trainer.model.build import Policy, chunks_of
from rlagent.trainer.sharded_state import MOMENTS, STEP


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of step `step` (0, 1, ...): linear warm-up over warmup_steps, then the schedule down to min_lr at the
    last step.

    >>> [learning_rate(OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear"), step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.6666666666666667, 0.33333333333333337, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - 1 - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


class DataParallel:
    """A policy with megatron's gradient buffers; distributed: each rank is given the sums of its slice of them only."""

    def __init__(self, module: Policy, *, distributed: bool) -> None:
        self.module: Any = module
        self.distributed = distributed
        settings = megatron.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        self.chunks = [megatron.DistributedDataParallel(module.config, settings, chunk) for chunk in chunks_of(module)]

    def zero_grad_buffer(self) -> None:
        """Before the first microbatch of an update."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


class PolicyOptimizer:
    """Megatron's optimizer over one data-parallel-wrapped model; steps only on finite gradients."""

    def __init__(self, config: OptimizerConfig, model: DataParallel, *, dtype: torch.dtype) -> None:
        self.config = config
        self.model = model
        self.distributed = model.distributed
        self._trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self.inner = megatron.get_megatron_optimizer(
            megatron.OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                use_distributed_optimizer=self.distributed,
            ),
            model.chunks,
            use_gloo_process_groups=False,
        )

    def zero_grad(self) -> None:
        """Before the first microbatch of an update."""
        self.model.zero_grad_buffer()
        with warnings.catch_warnings():
            # The slices of fp32 parameters are views: torch says that their .grad is not filled by itself.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            self.inner.zero_grad()

    def step(self, rate: float) -> float:
        """Clip and apply the summed gradients; returns their global norm before clipping. Raises LearnerError if it
        is not finite.
        """
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient norm is {norm}: the step was not applied. Lower optimizer.lr, or look for non-finite "
                "rewards and logprobs in the batch"
            )
        for group in self.inner.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        self.inner.step()
        return norm

    def states(self) -> dict[int, dict[str, Tensor]]:
        """What a resume needs of each parameter, by the id of the model's own parameter: the weights that AdamW updates
        ("param"; the fp32 copy where the model is bf16), both moments and AdamW's step, where it has stepped. With the
        distributed optimizer all ranks must call it, and only the first of those that share a parameter is answered.
        """
        if self.distributed:
            return sharded_state.gather(self.inner, self._trained)
        inner = self._inner_states()
        found: dict[int, dict[str, Tensor]] = {}
        for parameter in self._trained:
            master = getattr(parameter, "main_param", parameter)
            state = inner[id(master)][master]
            found[id(parameter)] = {"param": master.detach()} | {key: state[key] for key in MOMENTS if key in state}
        return found

    def _inner_states(self) -> dict[int, dict[Tensor, dict[str, Tensor]]]:
        """By the id of what AdamW updates, the state of the optimizer that holds it."""
        return {
            id(parameter): part.optimizer.state
            for part in self.inner.chained_optimizers
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        }

    def restore(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set what `states` gave, of the same shapes; the model's own (bf16) weights follow."""
        if self.distributed:
            sharded_state.restore(self.inner, self._trained, states)
            return
        inner = self._inner_states()
        for parameter in self._trained:
            master = getattr(parameter, "main_param", parameter)
            saved = states[id(parameter)]
            with torch.no_grad():
                master.copy_(saved["param"])
            # AdamW counts steps in a tensor of each parameter's own: one that is shared would count them all.
            state = inner[id(master)][master]
            state.clear()
            state |= {k: saved[k].clone() if k == STEP else saved[k].to(master.device) for k in MOMENTS if k in saved}
        for part in self.inner.chained_optimizers:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
