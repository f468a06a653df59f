"""AdamW around the learner's model, its learning-rate schedule, and its state as plain named tensors for
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlagent.errors import CheckpointError, LearnerError
from rlagent.trainer.config import OptimizerConfig
from rlagent.trainer.model import megatron

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


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


class PolicyOptimizer:
    """Megatron's optimizer over one data-parallel-wrapped model; steps only on finite gradients."""

    def __init__(self, config: OptimizerConfig, model: Any, *, dtype: torch.dtype) -> None:
        self.config = config
        self.model = model
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
            ),
            [model],
            use_gloo_process_groups=False,
        )

    def zero_grad(self) -> None:
        """Before the first microbatch of an update."""
        self.model.zero_grad_buffer()
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

    def _masters(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """(name, parameter that AdamW updates, its state) for each parameter; the fp32 copy where the model is bf16."""
        states = {
            id(parameter): part.optimizer.state
            for part in self.inner.chained_optimizers
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self.model.module.named_parameters():
            master = getattr(parameter, "main_param", parameter)
            yield name, master, states[id(master)][master]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resume needs: master weights, both moments, AdamW's own step of each parameter."""
        found: dict[str, Tensor] = {}
        for name, master, state in self._masters():
            found[f"{name}/param"] = master.detach()
            found |= {f"{name}/{key}": state[key] for key in MOMENTS if key in state}
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Set what `tensors` gave; the model's own (bf16) weights follow."""
        for name, master, state in self._masters():
            saved = tensors.get(f"{name}/param")
            if saved is None or saved.shape != master.shape:
                raise CheckpointError(f"the checkpoint has no parameter {name!r} of shape {tuple(master.shape)}")
            with torch.no_grad():
                master.copy_(saved)
            moments = {key: tensors[f"{name}/{key}"] for key in MOMENTS if f"{name}/{key}" in tensors}
            state.update(
                {key: value.clone() if key == "step" else value.to(master.device) for key, value in moments.items()}
            )
        for part in self.inner.chained_optimizers:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
