"""Texts of many calls are tokenised once, whoever asks when; what is kept has an end."""

import asyncio

import pytest

from rlagent.router import recent_texts
from rlagent.router.recent_texts import LONG_CHARS, RecentTexts


class Counted:
    """Ids are the characters' codes; `texts` are those that were tokenised."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.recent = RecentTexts(self.encode)

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [ord(letter) for letter in text]

    async def ids(self, text: str) -> list[int]:
        found = (await self.recent.ids(text)).tolist()
        assert found == [ord(letter) for letter in text]
        return found


@pytest.mark.parametrize("length", [2000, LONG_CHARS])
async def test_mates_of_a_group_share_the_ids_of_their_prompt(length: int) -> None:
    counted = Counted()
    await asyncio.gather(*(counted.ids("a" * length) for _ in range(8)))
    await counted.ids("a" * length)
    assert counted.texts == ["a" * length]
    await counted.ids("a" * (length - 1) + "b")
    assert len(counted.texts) == 2


async def test_a_mate_that_goes_away_takes_the_ids_of_no_other_with_it() -> None:
    counted = Counted()
    first, second = (asyncio.create_task(counted.ids("a" * LONG_CHARS)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert len(await second) == LONG_CHARS
    assert len(counted.texts) == 1


async def test_ids_that_are_shared_cannot_be_written() -> None:
    found = await Counted().recent.ids("a" * 2000)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


async def test_the_oldest_texts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_texts, "_MAX_CHARS", 6000)
    counted = Counted()
    for letter in "abacab":
        await counted.ids(letter * 2500)
    assert [text[0] for text in counted.texts] == ["a", "b", "c", "b"]
    await counted.ids("d" * 7000)  # more than is ever kept
    await counted.ids("d" * 7000)
    assert len(counted.texts) == 6


async def test_a_turns_own_text_is_not_kept() -> None:
    counted = Counted()
    for _ in range(2):
        await counted.ids("short")
    assert len(counted.texts) == 2
