"""Sampling a batch: temperature, top-k, top-p, min-p, one uniform number a row.

A row's uniform number is a hash of its seed and its position, so that a request's draw does not depend on its batch mates. The logprob
is of the distribution that was sampled: log_softmax(logits / T), renormalised where top-k, top-p or min-p cut it (as SGLang does);
a greedy row (temperature 0) reports log_softmax(logits).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from rlagent.errors import EngineError

_COLDEST: Final = 1e-5  # below it logits / temperature leaves f32: what is asked for is greedy
_MAX_N: Final = 1024  # sequences of one prompt
_KNOWN: Final = {
    "max_new_tokens": 128, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": None,
    "stop_token_ids": None, "ignore_eos": False, "skip_special_tokens": True, "no_stop_trim": False, "n": 1,
    "sampling_seed": None, "min_new_tokens": 0, "spaces_between_special_tokens": True,
    "stream_interval": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """SGLang's `sampling_params`, as far as the engine has them."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    skip_special_tokens: bool
    no_stop_trim: bool
    min_new_tokens: int
    n: int
    seed: int | None
    stream_interval: int = 1  # a stream tells of the first token and then of every so many

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """From a request's JSON. EngineError names an unknown key or a value out of range."""
        unknown = sorted(set(given) - set(_KNOWN))
        if unknown:
            raise EngineError(f"unknown sampling_params key {unknown[0]!r}; known: {', '.join(sorted(_KNOWN))}")
        p = {**_KNOWN, **given}
        stop = p["stop"] or ()
        try:
            params = cls(
                max_new_tokens=int(p["max_new_tokens"]), temperature=_temperature(p["temperature"]), top_p=float(p["top_p"]),
                top_k=int(p["top_k"]), min_p=float(p["min_p"]), stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_token_ids=frozenset(p["stop_token_ids"] or ()), ignore_eos=bool(p["ignore_eos"]),
                skip_special_tokens=bool(p["skip_special_tokens"]), no_stop_trim=bool(p["no_stop_trim"]),
                min_new_tokens=int(p["min_new_tokens"]), n=int(p["n"]),
                seed=None if p["sampling_seed"] is None else int(p["sampling_seed"]),
                stream_interval=1 if p["stream_interval"] is None else int(p["stream_interval"]),
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise EngineError(f"sampling_params: {error}") from error
        params._check()
        return params

    def _check(self) -> None:
        for name, ok, need in (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 or at least 1"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            ("stream_interval", self.stream_interval >= 1, "at least 1"),
            ("n", 1 <= self.n <= _MAX_N, f"in [1, {_MAX_N}]"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(type(i) is int for i in self.stop_token_ids), "integers"),
        ):
            if not ok:
                raise EngineError(f"sampling_params: {name} must be {need}, got {getattr(self, name)}")

    @property
    def cuts(self) -> bool:
        """Whether the distribution is cut, so that a sort is needed."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k >= 1 or self.min_p > 0)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Sample one id a row of logits [R, V] f32; ids and logprobs.

    seeds, positions: [R]; equal pairs give equal draws for equal logits.
    """
    temperature = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=logits.device)
    logprobs = torch.log_softmax(logits / temperature.unsqueeze(1), -1)
    if any(p.cuts for p in params):
        logprobs = _cut(logprobs, params)
    cumulative = logprobs.exp().double().cumsum(-1)
    uniform = torch.from_numpy(_uniform(seeds, positions)).to(logits.device)
    threshold = (uniform * cumulative[:, -1]).unsqueeze(1)
    ids = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0]
    if greedy:
        ids[greedy] = logits[greedy].argmax(-1)
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    return ids.tolist(), chosen.tolist()


def _temperature(given: Any) -> float:
    found = float(given)
    return 0.0 if 0 <= found < _COLDEST else found


def _cut(logprobs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep each row's top-k, then its top-p nucleus, then what reaches min-p of the best; renormalise."""
    device, width = logprobs.device, logprobs.shape[1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    ordered, order = logprobs.sort(-1, descending=True)
    probs = ordered.exp()
    rank = torch.arange(width, device=device)
    keep = rank < column([float(p.top_k if p.cuts and p.top_k >= 1 else width) for p in params])
    keep &= probs.cumsum(-1) - probs < column([p.top_p if p.cuts and p.top_p < 1 else 2.0 for p in params])
    keep &= probs >= probs[:, :1] * column([p.min_p if p.cuts else 0.0 for p in params])
    kept = ordered.masked_fill(~keep, float("-inf"))
    return torch.empty_like(logprobs).scatter_(1, order, torch.log_softmax(kept, -1))


def _uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[R] f64 in [0, 1): the splitmix64 finaliser (Steele et al. 2014) of seed and position."""
    with np.errstate(over="ignore"):
        x = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        for salt in (np.zeros(len(seeds), dtype=np.uint64), np.array(positions, dtype=np.uint64) + np.uint64(1)):
            x = x + salt * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
