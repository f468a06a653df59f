"""One request's state while it waits, runs and ends."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlagent.engine.sampling import SamplingParams
from rlagent.engine.stops import Stop
from rlagent.types import Int32Array


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A prompt and what was sampled after it. `ids` is both; the first `computed` of them have keys and values.

    emit is called from the engine's thread with the sequence itself: after each step when streaming, and once at its end.
    """

    rid: str
    ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    emit: Callable[["Sequence"], None]
    stream: bool = False
    logprob_start: int = -1  # prompt logprobs from here on; -1 wants none
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    epoch: int = 0  # the weights under which its keys and values were computed
    retractions: int = 0
    stop: Stop | None = None
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def output(self) -> list[int]:
        """The sampled ids, the stop token included."""
        return self.ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        """How many ids were sampled."""
        return len(self.ids) - self.prompt_len

    def append(self, token: int, logprob: float, version: str) -> None:
        """Add a sampled token, made by the policy `version`."""
        position = self.num_output
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            name, start, _ = self.spans[-1]
            self.spans[-1] = (name, start, position + 1)
        else:
            self.spans.append((version, position, position + 1))

    def retract(self) -> None:
        """Lose the keys and values: they will be computed again, under whatever weights there are then."""
        self.computed = 0
        self.retractions += 1

    def array(self, end: int) -> Int32Array:
        """The first `end` ids as int32."""
        return np.array(self.ids[:end], dtype=np.int32)

    def meta_info(self, version: str) -> dict[str, Any]:
        """SGLang's `meta_info`; version spans only once the sequence has ended."""
        info: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": None if self.stop is None else self.stop.to_json(),
            "prompt_tokens": self.prompt_len,
            "completion_tokens": self.num_output,
            "cached_tokens": self.cached,
            "weight_version": version,
            "num_retractions": self.retractions,
            "e2e_latency": time.perf_counter() - self.started_at,
        }
        if self.stop is not None:
            info["weight_versions"] = [{"version": name, "start": a, "end": b} for name, a, b in self.spans]
        return info
