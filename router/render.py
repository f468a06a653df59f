"""Conversations to token ids: whole, or only what follows recorded turns.

In the flow: the recorder asks for a fresh prompt, or for the segments between sampled turns. A template is a black box
that may treat an assistant's turn by its content, so segments are found by rendering the conversation with each sampled
turn replaced by a mark, and are then checked against the full render. Where a template treats what follows a turn with
tool calls by those calls (Mistral, gpt-oss), the calls stay and only what they say is marked (turn_shape.py).
Invariant: what was sampled is never rendered into ids again; only segments between sampled turns are tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from rlagent.router.chat_template import ChatTemplate, TemplateError
from rlagent.router.conversation import Conversation, Message, digest
from rlagent.router.families import FORMS, TEXT, FamilyName, detect
from rlagent.router.message_form import Plain, learn
from rlagent.router.tokenizer import Tokenizer
from rlagent.router.turn_shape import PROBE, TURN, Edges, between, plain_turn, shows_by_calls, spans_of_marks

# A client chooses the template's arguments: beyond so many kinds the oldest is learned again.
_MAX_FAMILIES: Final = 64
# Sets of tools that are kept guarded, and the JSON of the largest one: beyond it every render guards its own.
_MAX_TOOL_SETS: Final = 64
_MAX_TOOLS_BYTES: Final = 256 * 1024


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

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        family: FamilyName | None = None,
        placeholder: int | None = None,
    ) -> None:
        """placeholder: the id that the template puts for an image; None for a text model."""
        self._template = template
        self.tokenizer = tokenizer
        self.placeholder = placeholder
        detected = detect(template.source)
        self.family_known = detected is not None or family is not None
        self.output_form = FORMS[family] if family is not None else detected or TEXT
        self.message_form = learn(self._probe)
        self.digest = digest(template.source.encode(), tokenizer.digest.encode())
        self._families: dict[bytes, Family] = {}
        self._tools: dict[bytes, list[Plain]] = {}
        self._edges = Edges(self.message_form.reasoning_key) if shows_by_calls(self.message_form, self._probe) else None

    @classmethod
    def load(cls, model_dir: Path, family: FamilyName | None = None, placeholder: int | None = None) -> Renderer:
        """From a Hugging Face model directory. `family` overrides what is detected. LoadError says what is missing."""
        return cls(ChatTemplate.load(model_dir), Tokenizer.load(model_dir), family, placeholder)

    def fresh(self, conversation: Conversation) -> tuple[str, str]:
        """The whole prompt's text, and the digest of its body. TemplateError when the template refuses it."""
        text = self._text(self._plain(conversation.messages), conversation)
        return text, digest(self._family(conversation).body(text).encode())

    def segments(
        self, conversation: Conversation, sampled: Sequence[int], stops: Sequence[str | None]
    ) -> Segments | None:
        """The text around the sampled messages (ascending positions); None where the full render disagrees.

        stops: the text of the stop token that ended each, if one did. TemplateError when the template refuses the conversation.
        """
        messages = self._plain(conversation.messages)
        marked = list(messages)
        shaped = [self._edges is not None and bool(messages[position].get("tool_calls")) for position in sampled]
        for number, position in enumerate(sampled):
            marked[position] = self._marked(messages[position], number, shaped=shaped[number])
        text = self._text(marked, conversation)
        marks = spans_of_marks(text)
        texts: list[str] = []
        start = 0
        for number, position in enumerate(sampled):
            span = marks.get(number)
            if span is not None and shaped[number]:
                span = self._span(text, start, span, messages[position], stops[number], conversation)
            if span is None or span[0] < start:
                return None
            texts.append(text[start : span[0]])
            start = span[1]
        texts.append(text[start:])
        turns = between(self._text(messages, conversation), texts)
        if turns is None:
            return None
        body = self._family(conversation).body
        digests = tuple(digest(body(text).encode()) for text in texts)
        return Segments(texts=tuple(texts), turns=turns, digests=digests)

    def lead(self, conversation: Conversation, segment: str) -> str:
        """What the template puts between its generation prompt and an answer of which `segment` is the text before."""
        family = self._family(conversation)
        opener = family.opener if segment.endswith(family.opener) else ""
        return opener.removeprefix(family.generation_prompt) if opener.startswith(family.generation_prompt) else ""

    def stands_for(self, stop_id: int) -> int | None:
        """The token that a history has where this one, which is only sampled, ended a turn."""
        written = self.output_form.history_ends.get(self.tokenizer.decode([stop_id]))
        ids = [] if written is None else self.tokenizer.encode(written)
        return ids[0] if len(ids) == 1 else None

    def _marked(self, message: Plain, number: int, *, shaped: bool) -> Plain:
        if shaped and self._edges is not None:
            return self._edges.marked(message, number)
        return plain_turn(number)

    def _span(
        self,
        text: str,
        start: int,
        marks: tuple[int, int],
        message: Plain,
        stop: str | None,
        conversation: Conversation,
    ) -> tuple[int, int] | None:
        """Where a shaped turn begins and ends, around its marks."""
        assert self._edges is not None
        bare = replace(conversation, tools=())
        args = orjson.dumps(dict(conversation.template_args), option=orjson.OPT_SORT_KEYS)
        return self._edges.span(
            text, start, marks, message, stop, args, lambda said, prompt: self._text(said, bare, prompt=prompt)
        )

    def _plain(self, messages: Sequence[Message]) -> list[Plain]:
        return [self.message_form.plain(message, self.tokenizer.guard) for message in messages]

    def _probe(self, messages: Sequence[Plain]) -> str:
        return self._template.render(messages, tools=[], args={}, add_generation_prompt=False)

    def _text(self, messages: Sequence[Plain], conversation: Conversation, *, prompt: bool = True) -> str:
        return self._template.render(
            messages,
            tools=self._guarded(conversation.tools),
            args=self.tokenizer.guard(dict(conversation.template_args)),
            add_generation_prompt=prompt,
        )

    def _guarded(self, tools: Sequence[Mapping[str, Any]]) -> list[Plain]:
        """Tools as the template is given them. All turns of all sessions of a task have the same: they are guarded once."""
        if not tools:
            return []
        found = [dict(tool) for tool in tools]
        key = orjson.dumps(found)
        if key in self._tools:
            return self._tools[key]
        guarded = [self.tokenizer.guard(tool) for tool in found]
        if len(key) <= _MAX_TOOLS_BYTES:
            if len(self._tools) >= _MAX_TOOL_SETS:
                del self._tools[next(iter(self._tools))]
            self._tools[key] = guarded
        return guarded

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
            asked = self._text([PROBE], conversation, prompt=False)
            prompted = self._text([PROBE], conversation)
            history = self._text([PROBE, plain_turn(0), PROBE], conversation).partition(TURN.format(0))[0]
        except TemplateError:
            return Family("", "")  # segments are then compared whole
        return Family(
            prompted.removeprefix(asked) if prompted.startswith(asked) else "",
            history.removeprefix(asked) if history.startswith(asked) else "",
        )
