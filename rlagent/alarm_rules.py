"""Alarms as rules over metrics: settings, and the pure question whether a rule fires. No I/O.

In the flow: each line of metrics.jsonl is shown to every rule with the lines before it; what fires is acted on by `alarms.py`.
Invariant: a metric that a line lacks, or that is not a number, never fires a rule.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Action = Literal["log", "webhook", "stop"]
_CONDITIONS: Final = ("above", "below", "rises_by", "falls_to")


class AlarmRule(BaseModel):
    """A metric, one condition on it, and what to do. In TOML each is an [[alarms]] table; naming any replaces the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str = Field(min_length=1, description="name of a metric in metrics.jsonl")
    above: float | None = Field(None, description="fires where the metric is larger")
    below: float | None = Field(None, description="fires where it is smaller")
    rises_by: float | None = Field(None, gt=0, description="fires where it is so much over the median of the window")
    falls_to: float | None = Field(None, gt=0, lt=1, description="fires where it is under this share of that median")
    without: str | None = Field(
        None, description="with rises_by: only where this metric did not rise by as much within the window"
    )
    window: int = Field(
        10, ge=2, description="earlier steps that rises_by and falls_to look at; they wait for that many"
    )
    for_steps: int = Field(1, ge=1, description="steps in a row for which the condition must hold")
    action: Action = "log"
    url: str | None = Field(None, description="of the webhook: it gets a JSON body")

    @model_validator(mode="after")
    def _one_condition(self) -> "AlarmRule":
        given = [name for name in _CONDITIONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"the alarm on {self.metric!r} has {len(given)} conditions ({', '.join(given) or 'none'}); give exactly one of "
                f"{', '.join(_CONDITIONS)}"
            )
        if self.without is not None and self.rises_by is None:
            raise ValueError(
                f"the alarm on {self.metric!r} has `without` but no rises_by; add rises_by, or take it away"
            )
        if (self.action == "webhook") != (self.url is not None):
            raise ValueError(
                f"the alarm on {self.metric!r} has action = {self.action!r} and url = {self.url!r}; a webhook has both"
            )
        return self

    @property
    def condition(self) -> str:
        """The condition in words."""
        name = next(name for name in _CONDITIONS if getattr(self, name) is not None)
        rest = "" if self.without is None else f" without {self.without}"
        return f"{name.replace('_', ' ')} {getattr(self, name):g}{rest}"


# Wide bounds: what a healthy run of any size stays within.
DEFAULT_ALARMS: Final = (
    AlarmRule(metric="mismatch_fresh/abs_mean", above=0.05),  # engine and learner disagree on the very same weights
    AlarmRule(metric="policy/approx_kl", above=0.5),
    AlarmRule(metric="policy/entropy", falls_to=0.05, window=10),
    AlarmRule(metric="policy/clip_high", above=0.3),
    AlarmRule(metric="policy/clip_low", above=0.3),
    AlarmRule(metric="reward/mean", rises_by=0.5, without="eval/success", window=20),
    AlarmRule(metric="throughput/tokens_per_s", falls_to=0.25, window=10, for_steps=3),
)


def fires(rule: AlarmRule, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rule fires at the last of these records (lines of metrics.jsonl in order), and did not at the one before.

    A condition that goes on holding is one alarm, not one a step.
    """
    held = [_holds(rule, records[: end + 1]) for end in range(max(0, len(records) - rule.for_steps - 1), len(records))]
    now = len(held) >= rule.for_steps and all(held[-rule.for_steps :])
    before = len(held) > rule.for_steps and all(held[-rule.for_steps - 1 : -1])
    return now and not before


def _holds(rule: AlarmRule, records: Sequence[Mapping[str, Any]]) -> bool:
    value = _number(records[-1], rule.metric)
    if value is None:
        return False
    if rule.above is not None:
        return value > rule.above
    if rule.below is not None:
        return value < rule.below
    earlier = [x for record in records[:-1] if (x := _number(record, rule.metric)) is not None][-rule.window :]
    if len(earlier) < rule.window:
        return False
    if rule.falls_to is not None:
        return value < rule.falls_to * median(earlier)
    assert rule.rises_by is not None
    return value - median(earlier) > rule.rises_by and not _rose(rule, records)


def _rose(rule: AlarmRule, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the metric `without` rose by as much between its first and its last value of the window."""
    if rule.without is None or rule.rises_by is None:
        return False
    seen = [x for record in records[-rule.window - 1 :] if (x := _number(record, rule.without)) is not None]
    return len(seen) >= 2 and seen[-1] - seen[0] >= rule.rises_by


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
