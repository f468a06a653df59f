"""Answers that are compared as text or as numbers. Pure and quick, but for a pattern, which runs in a process that can be ended."""

import re
from fractions import Fraction
from typing import Any, Final

from rlagent.envs.verifiers.attempt import Attempt, Verifier
from rlagent.envs.verifiers.isolated import Isolated

_NUMBER: Final = re.compile(
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?: ?/ ?\d+)?%?", re.ASCII | re.IGNORECASE
)
_MAX_DIGITS: Final = 400  # longer ones are not answers, and Python refuses to read them
_MAX_EXPONENT: Final = 400  # beyond what a float holds; a fraction of 10**9999999 would take the machine


def exact(field: str = "answer", *, casefold: bool = False) -> Verifier:
    """1.0 if the answer is the task's field, but for the space around it (and upper case, with casefold)."""

    def verify(attempt: Attempt) -> float:
        found, wanted = attempt.answer.strip(), str(attempt.field(field)).strip()
        return float(found.casefold() == wanted.casefold() if casefold else found == wanted)

    return verify


def numeric(field: str = "answer", *, relative: float = 1e-6, absolute: float = 1e-9) -> Verifier:
    """1.0 if the last number of the answer is the task's: 1,234.5, 3/4, 12%, 1e-3. The task's may be a number or text."""

    def verify(attempt: Attempt) -> float:
        found, wanted = last_number(attempt.answer), last_number(str(attempt.field(field)))
        if found is None or wanted is None:
            return 0.0
        return float(abs(found - wanted) <= max(absolute, relative * abs(wanted)))

    return verify


def pattern(regex: str | None = None, *, field: str | None = None, full: bool = False, processes: int = 1) -> Isolated:
    """1.0 if the regular expression (its own, or the task's `field`) is found in the answer, or with `full` is all of it.

    It runs in a process of its own: a pattern that backtracks for ever is ended and counted, and stalls nobody.
    """
    given = {"regex": regex, "field": field, "full": full}
    return Isolated("rlagent.envs.verifiers.text:matches", arguments=given, processes=processes)


def matches(attempt: Attempt, *, regex: str | None, field: str | None, full: bool) -> float:
    """What `pattern` runs."""
    wanted = str(attempt.field(field)) if field is not None else regex or ""
    search: Any = re.fullmatch if full else re.search
    return float(search(wanted, attempt.answer.strip(), re.DOTALL) is not None)


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None where there is none."""
    for found in reversed(_NUMBER.findall(text)):
        plain = found.replace(",", "").replace(" ", "").lower()
        mantissa, _, rest = plain.rstrip("%").partition("/")
        exponent = mantissa.partition("e")[2] or "0"
        if len(plain) > _MAX_DIGITS or abs(int(exponent)) > _MAX_EXPONENT or (rest and not int(rest)):
            continue
        value = Fraction(mantissa) / (int(rest) if rest else 1)
        return value / 100 if plain.endswith("%") else value
    return None
