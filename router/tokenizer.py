"""A model's tokenizer for the router: text to ids and back, with `tokenizers` alone (no transformers, no torch).

Invariant: text that an agent sent never becomes a special token. Such text is marked by `guard` before it is rendered,
and `encode` turns a marked token into the ids of its plain letters. Tokens that are in the vocabulary but not special
(`<tool_call>`, `<think>`) stay what the template's own use of them would be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from tokenizers import Tokenizer as Backend

from rlagent.errors import LoadError
from rlagent.router.conversation import digest
from rlagent.router.recent_texts import RecentTexts
from rlagent.types import Int32Array

# Two private-use characters delimit a mark. Where an agent sends the first itself, it is marked too.
MARK_START: Final = "\ue000"
MARK_END: Final = "\ue001"
_MARK: Final = re.compile(f"{MARK_START}(s?[0-9]+){MARK_END}")
_LITERAL: Final = f"{MARK_START}0{MARK_END}"  # stands for MARK_START itself


class Tokenizer:
    """One model's tokenizer. Calls are quick and synchronous."""

    def __init__(self, backend: Backend, text: bytes) -> None:
        self._backend = backend
        self._plain = Backend.from_str(text.decode())
        self._plain.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._special_texts = longest_first
        self._find_special = re.compile("|".join(map(re.escape, longest_first))) if special else None
        self.size = max(backend.get_vocab_size(with_added_tokens=True), *(n + 1 for n in added), 0)
        self.digest = digest(text)
        self._recent = RecentTexts(self.encode)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """From tokenizer.json. LoadError, with the fix, when it is missing or broken."""
        path = model_dir / "tokenizer.json"
        try:
            text = path.read_bytes()
            backend = Backend.from_str(text.decode())
        except FileNotFoundError as error:
            raise LoadError(
                f"{str(model_dir)!r} has no tokenizer.json; save the tokenizer with transformers' save_pretrained"
            ) from error
        except Exception as error:  # tokenizers raises bare Exception for a broken file
            raise LoadError(f"{path} cannot be read: {error}; copy it again from the model") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, text)

    def guard(self, value: Any) -> Any:
        """A value of an agent (text, or JSON of any depth) in which no text can become a special token."""
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, dict):
            return {self._guard_text(name): self.guard(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(item) for item in value]
        return value

    def _guard_text(self, text: str) -> str:
        if MARK_START in text:
            text = text.replace(MARK_START, _LITERAL)
        if self._find_special is None:
            return text
        return self._find_special.sub(self._mark, text)

    def _mark(self, found: re.Match[str]) -> str:
        return f"{MARK_START}s{self._special[found[0]]}{MARK_END}"

    def unguard(self, text: str) -> str:
        """The text that was guarded."""
        return _MARK.sub(self._unmark, text) if MARK_START in text else text

    def _unmark(self, found: re.Match[str]) -> str:
        mark = found[1]
        if mark[0] != "s":
            return MARK_START
        number = int(mark[1:])
        return next(text for text, token in self._special.items() if token == number)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text whose agent-made parts are guarded."""
        if MARK_START not in text:
            return self._ids(self._backend, text)
        ids: list[int] = []
        for piece, token in self._split(text):
            if piece:
                ids += self._ids(self._plain, self.unguard(piece))
            if token is not None:
                ids.append(token)
        return ids

    async def encode_beside(self, text: str) -> Int32Array:
        """The same, a long text in a thread: tokenising needs neither the event loop nor the interpreter's lock."""
        return await self._recent.ids(text)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text whose special tokens are meant as such."""
        return self._ids(self._backend, text)

    def _split(self, text: str) -> list[tuple[str, int | None]]:
        """Text between the template's own special tokens, each with the token that follows it."""
        if self._find_special is None:
            return [(text, None)]
        pieces: list[tuple[str, int | None]] = []
        start = 0
        for found in self._find_special.finditer(text):
            pieces.append((text[start : found.start()], self._special[found[0]]))
            start = found.end()
        return [*pieces, (text[start:], None)]

    @staticmethod
    def _ids(backend: Backend, text: str) -> list[int]:
        """Without offsets, and without the interpreter's lock: a batch of one does both."""
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


class Detokenizer:
    """Ids to text piece by piece: a piece ends only where its last character is whole.

    The pieces together are the text of all ids, for every sequence that decodes to whole characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # of the window that is decoded: some ids before the unread ones, for their context
        self._read = 0
        self.text = ""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._ids += ids
        before, now = self._window()
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        return self._take(before, now)

    def finish(self) -> str:
        """What is left: characters that never became whole."""
        before, now = self._window()
        return self._take(before, now) if len(now) > len(before) else ""

    def _window(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        return before, self._tokenizer.decode(self._ids[self._start :])

    def _take(self, before: str, now: str) -> str:
        self._start, self._read = self._read, len(self._ids)
        piece = now[len(before) :]
        self.text += piece
        return piece


def read_stop_ids(model_dir: Path) -> frozenset[int]:
    """The ids that end a completion: eos_token_id of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.is_file():
            found = orjson.loads(path.read_bytes()).get("eos_token_id")
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
