"""rlagent: reinforcement learning of agents with the control inverted."""

from rlagent.client import SessionHandle
from rlagent.errors import RlagentError
from rlagent.types import Reward

__all__ = ["Reward", "RlagentError", "SessionHandle"]
