"""Prompts that are text or ids rather than a conversation: which recorded output does one go on from?

In the flow: plan.py asks for such a request's ids. A recorded output ends at a text: that of its prompt and of all its
sampled ids, the stop token's included. A prompt that begins with that text extends it: the sampled ids are kept, and
what follows them is tokenised alone. Invariant: as with conversations, what was sampled is never tokenised again, and a
prompt whose ids are given is extended only where those ids begin with the recorded ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from rlagent.router.conversation import RawPrompt
from rlagent.router.errors import invalid
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Int32Array

N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class TextEnd:
    """A text by its length in characters and its hash."""

    length: int
    digest: str


def text_end(text: str) -> TextEnd:
    """The end of a text."""
    return TextEnd(len(text), _hash(text).hexdigest())


@dataclass(slots=True)
class TextIndex(Generic[N]):
    """Nodes by the text that they end. A look-up reads the prompt once, however many nodes there are."""

    _nodes: dict[int, dict[str, list[N]]] = field(default_factory=dict)

    def add(self, end: TextEnd, node: N) -> None:
        """Enter a node."""
        self._nodes.setdefault(end.length, {}).setdefault(end.digest, []).append(node)

    def find(self, text: str) -> list[tuple[int, list[N]]]:
        """The nodes whose text the given one begins with, with that text's length, the longest first."""
        found: list[tuple[int, list[N]]] = []
        state, start = _hash(""), 0
        for length in sorted(length for length in self._nodes if length <= len(text)):
            state.update(text[start:length].encode())
            start = length
            nodes = self._nodes[length].get(state.hexdigest())
            if nodes:
                found.append((length, nodes))
        return found[::-1]


def whole_text(prompt: RawPrompt, tokenizer: Tokenizer) -> str:
    """The text of a prompt. 400 for ids that the model does not have."""
    if prompt.ids is None:
        return prompt.text
    if max(prompt.ids) >= tokenizer.size:
        raise invalid(f"prompt holds the id {max(prompt.ids)}, beyond a vocabulary of {tokenizer.size}", "prompt")
    return tokenizer.decode(prompt.ids)


def whole_ids(prompt: RawPrompt, tokenizer: Tokenizer) -> Int32Array:
    """The ids of a prompt that goes on from nothing recorded."""
    return np.array(tokenizer.encode_plain(prompt.text) if prompt.ids is None else prompt.ids, np.int32)


def ids_behind(prompt: RawPrompt, known: Int32Array, known_length: int, tokenizer: Tokenizer) -> Int32Array | None:
    """The ids behind the recorded ones, whose text is `known_length` characters; None where the prompt's ids differ."""
    if prompt.ids is None:
        rest: Sequence[int] = tokenizer.encode_plain(prompt.text[known_length:])
    elif np.array_equal(prompt.ids[: len(known)], known):
        rest = prompt.ids[len(known) :]
    else:
        return None
    return np.array(rest, np.int32)


def _hash(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode(), digest_size=16)
