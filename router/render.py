"""Conversations to token ids: whole, or only what follows recorded turns.

In the flow: the recorder asks for a fresh prompt, or for the segments between sampled turns. A template is a black box
that may treat an assistant's turn by its content, so segments are found by rendering the conversation with each sampled
turn replaced by a mark, and are then checked against the full render.
Invariant: what was sampled is never rendered into ids again; only segments between sampled turns are tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import orjson

from rlagent.router.chat_template import ChatTemplate, TemplateError
from rlagent.router.conversation import Conversation, Message, digest
from rlagent.router.families import FORMS, TEXT, FamilyName, detect
from rlagent.router.message_form import Plain, learn
from rlagent.router.tokenizer import MARK_END, MARK_START, Tokenizer

# Stands for the sampled turn number i. No agent's text can hold it: guarded text has "0" or "s..." after the start.
_TURN: Final = f"{MARK_START}t{{}}{MARK_END}"
_PROBE: Final[Plain] = {"role": "user", "content": "a"}
# A client chooses the template's arguments: beyond so many kinds the oldest is learned again.
_MAX_FAMILIES: Final = 64


@dataclass(frozen=True, slots=True)
class Family:
    """How a template opens an assistant's turn: at the prompt's end, and within a history."""

    generation_prompt: str
    opener: str

    def body(self, segment: str) -> str:
        """A segment without the opening of the turn that follows it: equal then and now, also where the two openings differ."""
        for opening in (self.generation_prompt, self.opener):
            if opening and segment.endswith(opening):
                return segment[: -len(opening)]
        return segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The text between sampled turns. `texts` [k + 1] stand around k turns; `turns` [k] are their canonical renders."""

    texts: tuple[str, ...]
    turns: tuple[str, ...]
    digests: tuple[str, ...]


class Renderer:
    """One model's chat template with its tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, family: FamilyName | None = None) -> None:
        self._template = template
        self.tokenizer = tokenizer
        detected = detect(template.source)
        self.family_known = detected is not None or family is not None
        self.output_form = FORMS[family] if family is not None else detected or TEXT
        self.message_form = learn(self._probe)
        self.digest = digest(template.source.encode(), tokenizer.digest.encode())
        self._families: dict[bytes, Family] = {}

    @classmethod
    def load(cls, model_dir: Path, family: FamilyName | None = None) -> Renderer:
        """From a Hugging Face model directory. `family` overrides what is detected. LoadError says what is missing."""
        return cls(ChatTemplate.load(model_dir), Tokenizer.load(model_dir), family)

    def fresh(self, conversation: Conversation) -> tuple[str, str]:
        """The whole prompt's text, and the digest of its body. TemplateError when the template refuses it."""
        text = self._text(self._plain(conversation.messages), conversation)
        return text, digest(self._family(conversation).body(text).encode())

    def segments(self, conversation: Conversation, sampled: Sequence[int]) -> Segments | None:
        """The text around the sampled messages (ascending positions); None where the full render disagrees.

        TemplateError when the template refuses the conversation.
        """
        messages = self._plain(conversation.messages)
        marked = list(messages)
        for number, position in enumerate(sampled):
            marked[position] = _turn(number)
        rest = self._text(marked, conversation)
        texts: list[str] = []
        for number in range(len(sampled)):
            text, mark, rest = rest.partition(_TURN.format(number))
            if not mark:
                return None
            texts.append(text)
        texts.append(rest)
        turns = _between(self._text(messages, conversation), texts)
        if turns is None:
            return None
        body = self._family(conversation).body
        digests = tuple(digest(body(text).encode()) for text in texts)
        return Segments(texts=tuple(texts), turns=turns, digests=digests)

    def _plain(self, messages: Sequence[Message]) -> list[Plain]:
        return [self.message_form.plain(message, self.tokenizer.guard) for message in messages]

    def _probe(self, messages: Sequence[Plain]) -> str:
        return self._template.render(messages, tools=[], args={}, add_generation_prompt=False)

    def _text(self, messages: Sequence[Plain], conversation: Conversation, *, prompt: bool = True) -> str:
        return self._template.render(
            messages,
            tools=[self.tokenizer.guard(dict(tool)) for tool in conversation.tools],
            args=conversation.template_args,
            add_generation_prompt=prompt,
        )

    def _family(self, conversation: Conversation) -> Family:
        """Learned once for each set of template arguments."""
        key = orjson.dumps(dict(conversation.template_args), option=orjson.OPT_SORT_KEYS)
        if key not in self._families:
            if len(self._families) >= _MAX_FAMILIES:
                del self._families[next(iter(self._families))]
            self._families[key] = self._learn(replace(conversation, tools=()))
        return self._families[key]

    def _learn(self, conversation: Conversation) -> Family:
        try:
            asked = self._text([_PROBE], conversation, prompt=False)
            prompted = self._text([_PROBE], conversation)
            history = self._text([_PROBE, _turn(0), _PROBE], conversation).partition(_TURN.format(0))[0]
        except TemplateError:
            return Family("", "")  # segments are then compared whole
        return Family(
            prompted.removeprefix(asked) if prompted.startswith(asked) else "",
            history.removeprefix(asked) if history.startswith(asked) else "",
        )


def _between(text: str, segments: Sequence[str]) -> tuple[str, ...] | None:
    """What stands between the segments in `text`, if it is made of them in order, anchored at both ends."""
    if not text.startswith(segments[0]):
        return None
    start = len(segments[0])
    found: list[str] = []
    for segment in segments[1:-1]:
        at = text.find(segment, start)
        if at < 0:
            return None
        found.append(text[start:at])
        start = at + len(segment)
    if len(segments) > 1:
        end = len(text) - len(segments[-1])
        if end < start or not text.endswith(segments[-1]):
            return None
        found.append(text[start:end])
    return tuple(found)


def _turn(number: int) -> Plain:
    return {"role": "assistant", "content": _TURN.format(number)}
