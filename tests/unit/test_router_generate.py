"""A choice whose engine dies in mid-call: what it had told is kept as far as its versions are known."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlagent.errors import EngineError
from rlagent.router.balance import Pool
from rlagent.router.engine_client import EngineDown, Part
from rlagent.router.generate import Generator
from rlagent.types import Choice, Int32Array, Sampling, VersionSpan

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=400, stop=(), seed=3)
PROMPT = np.array([5, 6], np.int32)


def part(ids: list[int], version: int, finish: Mapping[str, Any] | None = None) -> Part:
    """As an engine tells it while it runs: all of it labelled with the version that is then in force."""
    span = VersionSpan(version=version, start=0, end=len(ids))
    return Part(ids=ids, logprobs=[-0.5] * len(ids), spans=(span,), finish=finish)


class Told:
    """An engine that tells the given parts and then dies, or ends."""

    url = "told"
    state = "ready"
    running = 0

    def __init__(self, *lives: list[Part]) -> None:
        self.lives = list(lives)
        self.asked: list[tuple[list[int], dict[str, Any]]] = []

    async def stream(
        self, rid: str, ids: Int32Array, params: dict[str, Any], *, experts_from: int | None, images: Sequence[str]
    ) -> AsyncIterator[Part]:
        assert not images
        self.asked.append((ids.tolist(), params))
        life = self.lives.pop(0)
        for one in life:
            yield one
        if life[-1].finish is None:
            raise EngineDown("gone")

    async def healthy(self) -> bool:
        return True


async def choice(engine: Told, **more: Any) -> Choice:
    engines: Any = [engine]
    generator = Generator(Pool(engines), tokenizer=None)  # type: ignore[arg-type]
    return await generator.choice("r", "s", None, PROMPT, SAMPLING, num_new=2, trainable=True, **more)


END = {"type": "length", "length": 2}


def spans(found: Choice) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in found.versions]


async def test_only_what_is_of_one_known_version_is_kept() -> None:
    """The second part may hold ids of both versions: which is which would have been told at the end."""
    engine = Told([part([1, 2], 0), part([1, 2, 3, 4], 1)], [part([7, 8], 1, END)])
    found = await choice(engine)
    assert found.output_ids.tolist() == [1, 2, 7, 8]
    assert spans(found) == [(0, 0, 2), (1, 2, 4)]
    assert [ids for ids, _ in engine.asked] == [[5, 6], [5, 6, 1, 2]]
    (_, first), (_, second) = engine.asked
    assert (first["max_new_tokens"], second["max_new_tokens"]) == (400, 398)
    assert second["sampling_seed"] == 5  # it must not draw what it drew before


async def test_what_an_agent_was_shown_cannot_be_taken_back() -> None:
    engine = Told([part([1, 2], 0), part([1, 2, 3], 1)])
    with pytest.raises(EngineError, match="spans a weight update"):
        await choice(engine, on_ids=lambda _: None)


async def test_under_a_grammar_it_starts_again() -> None:
    engine = Told([part([1, 2], 0)], [part([7, 8], 0, END)])
    found = await choice(engine, schema="{}")
    assert found.output_ids.tolist() == [7, 8]


async def test_a_long_answer_is_told_of_less_often() -> None:
    engine = Told([part([7, 8], 0, END)], [part([7, 8], 0, END)])
    await choice(engine)
    await choice(engine, on_ids=lambda _: None)
    assert [params.get("stream_interval") for _, params in engine.asked] == [64, None]
