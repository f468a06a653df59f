"""The frozen reference of the KL term: a copy of the policy that moves by `refresh` alone, and the proof of that. Where adapters
are trained it is the policy's own base, with no copy.

In the flow: learner.py scores it before a step's updates, verifies it after them, and refreshes it every N steps by setting.
Invariant: between two refreshes not one bit of it changes; else the run stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from rlagent.errors import LearnerError
from rlagent.trainer import weights
from rlagent.trainer.config import ReferenceConfig
from rlagent.trainer.forward import score_all
from rlagent.trainer.lora import Adapters
from rlagent.trainer.microbatch import Microbatch
from rlagent.trainer.model.architecture import Architecture
from rlagent.trainer.model.build import Policy
from rlagent.trainer.parallel import ParallelPlan
from rlagent.trainer.weight_map import Rule, renamed

# How its tensors are called in a checkpoint.
PREFIX: Final = "reference."
_BITS: Final = {2: torch.int16, 4: torch.int32}


class ReferencePolicy:
    """This rank's part of the reference."""

    def __init__(
        self,
        config: ReferenceConfig,
        model: Policy,
        arch: Architecture,
        plan: ParallelPlan,
        adapters: Adapters | None = None,
    ) -> None:
        """model: a copy of the policy, or, with its adapters, the policy itself."""
        self.config = config
        self.model = model
        self._arch, self._plan, self._adapters = arch, plan, adapters
        if adapters is None:
            model.requires_grad_(False)
        self._mark = self._fingerprint()

    def logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Its logprobs [S] of each microbatch's scored tokens, on the last stage."""
        with self._adapters.off() if self._adapters else contextlib.nullcontext():
            return score_all(self.model, microbatches, self._plan)

    def _fingerprint(self) -> list[int]:
        """Of each frozen parameter, the sum of its bits as integers, each times an odd number of its place."""
        found = []
        for parameter in self.model.parameters():
            if parameter.requires_grad:  # an adapter
                continue
            bits = parameter.detach().reshape(-1).view(_BITS[parameter.element_size()]).long()
            places = torch.arange(1, 2 * len(bits), 2, device=bits.device)
            found.append(int((bits * places).sum()))
        return found

    def verify(self) -> None:
        """Raise LearnerError if a weight moved since the last refresh."""
        if self.config.verify and self._fingerprint() != self._mark:
            raise LearnerError(
                "the reference policy moved though it was not refreshed: KL to it means nothing any more. The weights on "
                "disk are as they were; look for code that writes to the learner's reference"
            )

    @torch.no_grad()
    def refresh(self, policy: Policy, step: int) -> bool:
        """After `step` steps: take the policy's weights, where it is time."""
        if not self.config.refresh_every or step % self.config.refresh_every:
            return False
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.copy_(theirs)
        self._mark = self._fingerprint()
        return True

    def parameters(self) -> dict[Rule, Tensor]:
        """What a checkpoint must hold of it: all of it where it is ever refreshed, else nothing."""
        if not self.config.refresh_every:
            return {}
        local = weights.local_parameters(self.model, self._arch, self._plan)
        return {renamed(rule, PREFIX): parameter for rule, parameter in local.items()}

    @torch.no_grad()
    def restore(self, states: dict[Rule, dict[str, Tensor]]) -> None:
        """Set what `parameters` gave."""
        for rule, parameter in self.parameters().items():
            parameter.copy_(states[rule]["param"])
        self._mark = self._fingerprint()
