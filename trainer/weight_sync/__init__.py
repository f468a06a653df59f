"""Weights from the learner to the engines."""

from rlagent.trainer.weight_sync.push import WeightSync
from rlagent.trainer.weight_sync.report import PushReport

__all__ = ["PushReport", "WeightSync"]
