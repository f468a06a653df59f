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

    emit is called from the engine's thread: every `stream_interval` tokens when streaming, and once at its end.
    """

    rid: str
    ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    emit: Callable[["Progress"], None]
    stream: bool = False
    logprob_start: int = -1  # prompt logprobs from here on; -1 wants none
    routed_start: int = -1  # the experts of its tokens from here on; -1 wants none
    routed: Int32Array | None = None  # [tokens that were fed, layers, top_k], at its end
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

    def tell(self, version: str) -> None:
        """Emit how far it has come, under the weights `version`."""
        self.emit(
            Progress(
                sequence=self,
                num_output=self.num_output,
                stop=self.stop,
                version=version,
                num_retractions=self.retractions,
                elapsed_s=time.perf_counter() - self.started_at,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A sequence as of one step, made in the engine's thread and read in another while that one goes on.

    Invariant: nothing that is read through it changes any more: of what grows, only the first `num_output` entries are.
    """

    sequence: Sequence
    num_output: int
    stop: Stop | None
    version: str
    num_retractions: int
    elapsed_s: float

    @property
    def output(self) -> list[int]:
        """The sampled ids so far, the stop token included."""
        start = self.sequence.prompt_len
        return self.sequence.ids[start : start + self.num_output]

    @property
    def logprobs(self) -> list[float]:
        """One for each of `output`."""
        return self.sequence.logprobs[: self.num_output]

    def meta_info(self) -> dict[str, Any]:
        """SGLang's `meta_info`; version spans only once the sequence has ended."""
        info: dict[str, Any] = {
            "id": self.sequence.rid,
            "finish_reason": None if self.stop is None else self.stop.to_json(),
            "prompt_tokens": self.sequence.prompt_len,
            "completion_tokens": self.num_output,
            "cached_tokens": self.sequence.cached,
            "weight_version": self.version,
            "num_retractions": self.num_retractions,
            "e2e_latency": self.elapsed_s,
        }
        if self.stop is not None:
            info["weight_versions"] = [{"version": name, "start": a, "end": b} for name, a, b in self.sequence.spans]
        return info
