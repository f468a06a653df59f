"""Mathematical answers, equal by meaning: LaTeX, expressions, sets, intervals, through math-verify (extra `math`).

math-verify asks sympy, which may not end, and would use signals to stop it; here its own limits are off and the process that it
runs in is killed (`Isolated`).
"""

import logging

from rlagent.envs.verifiers.attempt import Attempt
from rlagent.envs.verifiers.isolated import Isolated
from rlagent.errors import VerifierError


def math_answer(field: str = "answer", *, processes: int = 1) -> Isolated:
    """1.0 if the answer's result (boxed, in dollars, or last) equals the task's: \\frac{1}{2}, 0.5, {1, 2}, x^2 + 1."""
    return Isolated("rlagent.envs.verifiers.math_answer:equal", arguments={"field": field}, processes=processes)


def equal(attempt: Attempt, *, field: str) -> float:
    """What `math_answer` runs. VerifierError when the task's own answer cannot be read, or math-verify is not installed."""
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise VerifierError("math-verify is not installed: pip install 'rlagent-rl[math]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off, at every call
    wanted = str(attempt.field(field))
    gold = math_verify.parse(wanted if "\\boxed" in wanted else f"\\boxed{{{wanted}}}", parsing_timeout=None)
    if not gold:
        raise VerifierError(f"the task's {field} {wanted!r} is not mathematics that math-verify can read")
    found = math_verify.parse(attempt.answer, parsing_timeout=None)
    return float(math_verify.verify(gold, found, timeout_seconds=None))
