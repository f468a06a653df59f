"""Streams of a small microbatch for tests of losses, corrections and metrics."""

from typing import Any

import torch

from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.loss import LossOutput, policy_loss
from rlagent.trainer.streams import LossInput

UNCORRECTED = CorrectionConfig()


def streams(**given: Any) -> LossInput:
    """Five tokens of two sequences, the third masked out."""
    made: dict[str, Any] = {
        "logprobs": torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.5], dtype=torch.float64),
        "old_logprobs": torch.tensor([-1.2, -0.5, -2.5, -0.4, -1.1], dtype=torch.float64),
        "rollout_logprobs": torch.tensor([-1.1, -0.6, -2.5, -0.4, -1.3], dtype=torch.float64),
        "ref_logprobs": None,
        "entropy": None,
        "advantages": torch.tensor([1.0, 1.0, 0.0, -2.0, -2.0], dtype=torch.float64),
        "weight": torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25], dtype=torch.float64),
        "loss_mask": torch.tensor([True, True, False, True, True]),
        "sequence_index": torch.tensor([0, 0, 0, 1, 1]),
        **given,
    }
    return LossInput(**made)


def run(s: LossInput, name: str = "ppo", *, c: CorrectionConfig = UNCORRECTED, **options: Any) -> LossOutput:
    """The loss `name` of these streams; options are those of LossConfig."""
    return policy_loss(s, LossConfig(name=name, **options), c)
