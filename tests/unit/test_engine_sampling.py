"""Sampling: frequencies over many seeds, logprobs of the distribution that was sampled, draws that depend on nothing else."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.engine.sampling import SamplingParams, sample
from rlagent.errors import EngineError

COUNT = 20000
PROBS = [0.5, 0.25, 0.15, 0.1]


def draw(probs: list[float], seeds: range = range(COUNT), position: int = 3, **params: Any) -> tuple[Any, Any]:
    """One id a seed, and its logprob."""
    rows = torch.tensor([probs]).log().repeat(len(seeds), 1)
    ids, logprobs = sample(rows, [SamplingParams.parse(params)] * len(seeds), list(seeds), [position] * len(seeds))
    return np.array(ids), np.array(logprobs)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 99}, PROBS),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"min_p": 0.29}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_k": 3, "min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 2.0, "top_k": 1}, [1, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 1e-30}, [1, 0, 0, 0]),
    ],
)
def test_frequencies_and_logprobs_are_the_distributions(params: dict[str, Any], expected: list[float]) -> None:
    ids, logprobs = draw(PROBS, **params)
    observed = np.bincount(ids, minlength=4)
    wanted = np.array(expected) * COUNT
    assert not observed[wanted == 0].any()
    chi_square = ((observed - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    assert chi_square < 16.3  # the 0.1 % point at 3 degrees of freedom; the seeds are fixed
    reported = PROBS if params.get("temperature", 1) < 1e-5 else expected  # a greedy draw reports the model's own
    assert logprobs == pytest.approx(np.log(np.array(reported)[ids]), abs=1e-5)


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    by_seed, _ = draw([0.5, 0.5])
    next_seed, _ = draw([0.5, 0.5], range(1, COUNT + 1))
    next_position, _ = draw([0.5, 0.5], position=4)
    assert (by_seed[1:] == next_seed[:-1]).all()  # a seed and a position decide
    for other in (next_position, np.roll(by_seed, 1)):
        assert abs(np.corrcoef(by_seed, other)[0, 1]) < 4 / math.sqrt(COUNT)
    rows = torch.zeros(COUNT, 2)
    along, _ = sample(rows, [SamplingParams.parse({})] * COUNT, [7] * COUNT, list(range(COUNT)))
    assert abs(np.mean(along) - 0.5) < 2 / math.sqrt(COUNT)
    assert abs(np.corrcoef(along[1:], along[:-1])[0, 1]) < 4 / math.sqrt(COUNT)


def reference(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution by its definition, one row at a time, in f64."""
    if p.temperature == 0:
        return np.exp(logits - np.logaddexp.reduce(logits))
    probs = np.exp(logits / p.temperature - np.logaddexp.reduce(logits / p.temperature))
    order = np.argsort(-probs, kind="stable")
    kept = np.zeros(len(probs))
    mass = 0.0
    for rank, token in enumerate(order):
        if (0 < p.top_k <= rank) or mass >= p.top_p or probs[token] < p.min_p * probs[order[0]]:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return kept / kept.sum()


@given(data=st.data(), rows=st.integers(1, 6), width=st.integers(1, 12))
@settings(deadline=None, max_examples=150)
def test_a_mixed_batch_reports_each_rows_own_distribution(data: st.DataObject, rows: int, width: int) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    logits = np.random.default_rng(seed).normal(0, 2, (rows, width))
    params = [
        SamplingParams.parse(
            {
                "temperature": data.draw(st.sampled_from([0, 0.3, 1.0, 1.7])),
                "top_k": data.draw(st.sampled_from([-1, 1, 2, 5])),
                "top_p": data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.01])),
                "min_p": data.draw(st.sampled_from([0.0, 0.05, 0.4])),
            }
        )
        for _ in range(rows)
    ]
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=rows, max_size=rows))
    positions = list(range(rows))
    ids, logprobs = sample(torch.tensor(logits, dtype=torch.float32), params, seeds, positions)
    for row, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        assert logprob == pytest.approx(np.log(reference(logits[row], params[row])[token]), abs=1e-4)
        if params[row].temperature == 0:
            assert token == logits[row].argmax()
        alone = sample(
            torch.tensor(logits[row : row + 1], dtype=torch.float32), [params[row]], [seeds[row]], [positions[row]]
        )
        assert alone[0] == [token]  # whatever its batch mates are


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "unknown sampling_params key 'temprature'"),
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k must be -1 or at least 1"),
        ({"min_p": -1}, "min_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": None}, "sampling_params"),
        ({"n": 0}, "n must be"),
        ({"stop": [1]}, "stop must be non-empty strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be integers"),
        ({"sampling_seed": "x"}, "sampling_params"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        SamplingParams.parse(given)
