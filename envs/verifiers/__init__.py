"""Verifiers: what an attempt at a task is worth. See README.md of envs and docs/write_a_verifier.md."""

from rlagent.envs.verifiers.attempt import Attempt, Endpoint, Staged, Verifier, text_of
from rlagent.envs.verifiers.isolated import Isolated
from rlagent.envs.verifiers.judge import judge
from rlagent.envs.verifiers.math_answer import math_answer
from rlagent.envs.verifiers.programs import Programs
from rlagent.envs.verifiers.reward_model import reward_model
from rlagent.envs.verifiers.rubric import Check, Rubric
from rlagent.envs.verifiers.text import exact, numeric, pattern

__all__ = [
    "Attempt",
    "Check",
    "Endpoint",
    "Isolated",
    "Programs",
    "Rubric",
    "Staged",
    "Verifier",
    "exact",
    "judge",
    "math_answer",
    "numeric",
    "pattern",
    "reward_model",
    "text_of",
]
