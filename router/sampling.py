"""Whose sampling wins: the run's in a trained session, the client's elsewhere, a session's own settings over both.

In the flow: the dialect says what was asked, the recorder uses what is decided here. Invariant: what was asked and not
granted is named, so that it can be recorded and answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlagent.errors import ConfigError
from rlagent.router.config import SamplingConfig
from rlagent.router.errors import invalid
from rlagent.types import Sampling

# Settings that no engine of ours has: their neutral values are accepted, others only where the run's sampling wins.
_NEUTRAL: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
_SESSION_SETTINGS: Final = ("temperature", "top_p", "top_k", "max_tokens", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the client asks for; None where it says nothing. `other` holds penalties and the like."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    other: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The sampling in effect, and the names of what was asked and not granted."""

    sampling: Sampling
    overridden: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether logprobs are those of the whole, unmasked policy, so that the tokens can be trained on."""
        return self.sampling.temperature > 0 and self.sampling.top_p == 1.0 and self.sampling.top_k in (-1, 0)


def decide(asked: Asked, run: SamplingConfig, session: Mapping[str, float | int], *, trained: bool) -> Decision:
    """The sampling of one call. A 400 where the client may not be overridden, or asks for what cannot be done."""
    other = {name: value for name, value in (asked.other or {}).items() if value != _NEUTRAL[name]}
    if other and not trained:
        name = next(iter(other))
        raise invalid(f"{name} is not supported; leave it out", name)
    values: dict[str, float | int | None] = {
        "temperature": run.temperature,
        "top_p": run.top_p,
        "top_k": run.top_k,
        "seed": None,
        "max_tokens": run.max_tokens,
    }
    wishes = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k, "seed": asked.seed}
    if not trained:
        values |= {name: value for name, value in wishes.items() if value is not None}
    values |= dict(session)
    cap = int(values["max_tokens"] or run.max_tokens)
    overridden = [name for name, value in wishes.items() if value is not None and value != values[name]]
    if asked.max_tokens is not None and asked.max_tokens > cap:
        overridden.append("max_tokens")
    overridden += other
    refused = [name for name in overridden if name != "max_tokens"]
    if refused and trained and run.client == "refuse":
        raise invalid(
            f"{refused[0]} belongs to the run, which samples with {values.get(refused[0])}; leave it out", refused[0]
        )
    sampling = Sampling(
        temperature=float(values["temperature"] or 0.0),
        top_p=float(values["top_p"] or 1.0),
        top_k=int(values["top_k"] or -1),
        max_tokens=cap if asked.max_tokens is None else min(asked.max_tokens, cap),
        stop=asked.stop,
        seed=None if values["seed"] is None else int(values["seed"]),
    )
    return Decision(sampling, tuple(overridden))


def check_session_sampling(given: Mapping[str, float | int]) -> None:
    """A session's own settings, when it is opened. ConfigError names an unknown one or a value out of range."""
    unknown = sorted(set(given) - set(_SESSION_SETTINGS))
    if unknown:
        raise ConfigError(f"sampling.{unknown[0]} is unknown; a session may set {', '.join(_SESSION_SETTINGS)}")
    for name, ok, need in (
        ("temperature", 0 <= given.get("temperature", 1) <= 10, "in [0, 10]"),
        ("top_p", 0 < given.get("top_p", 1) <= 1, "in (0, 1]"),
        ("top_k", given.get("top_k", -1) >= -1, "-1 or more"),
        ("max_tokens", given.get("max_tokens", 1) >= 1, "at least 1"),
    ):
        if not ok:
            raise ConfigError(f"sampling.{name} must be {need}, got {given[name]}")
