"""Weights from the learner to the engines."""

from rlagent.trainer.push_report import PushReport
from rlagent.trainer.weight_sync.push import WeightSync

__all__ = ["PushReport", "WeightSync"]
