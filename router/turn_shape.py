"""A sampled turn within a rendered history: marked, so that it can be found, and its edges.

In the flow: render.py renders a conversation with marks in the place of sampled turns. A turn that is text becomes one
mark. A turn with tool calls becomes one too, unless the template treats what follows by the calls (a tool's name in its
result's header, an order of roles that counts turns): then names and ids stay, and what was said and given is marked.
Such a turn's edges, from the generation prompt to its first mark and from its last mark to its stop token, are those that
the template writes around the same turn in a conversation of two messages. Invariant: an edge that is not found so is not
guessed; the turn then has no segments around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import orjson

from rlagent.router.chat_template import TemplateError
from rlagent.router.conversation import Message, ToolCall
from rlagent.router.message_form import MessageForm, Plain
from rlagent.router.tokenizer import MARK_END, MARK_START

# Stands for the sampled turn number i. No agent's text can hold it: guarded text has "0" or "s..." after the start.
TURN: Final = f"{MARK_START}t{{}}{MARK_END}"
_MARK: Final = re.compile(TURN.format("([0-9]+)"))
PROBE: Final[Plain] = {"role": "user", "content": "a"}
# A long text is sought by its first characters: to prepare the search for all of it costs more than to compare.
_SOUGHT_CHARS: Final = 64
# Turns whose edges are remembered: each has ids and names of its own.
_MAX_EDGES: Final = 4096

Render = Callable[[Sequence[Plain], bool], str]  # messages, whether an answer is asked for
_Edge = tuple[str, str]  # before the first mark, and from the last one to the stop token's end


def plain_turn(number: int) -> Plain:
    """A turn as one mark."""
    return {"role": "assistant", "content": TURN.format(number)}


def spans_of_marks(text: str) -> dict[int, tuple[int, int]]:
    """Of each turn from its first mark to the end of its last: one pass, however many turns there are."""
    spans: dict[int, tuple[int, int]] = {}
    for mark in _MARK.finditer(text):
        number = int(mark[1])
        spans[number] = (spans[number][0] if number in spans else mark.start(), mark.end())
    return spans


class Edges:
    """Turns with tool calls, for templates that treat what follows by the calls."""

    def __init__(self, reasoning_key: str) -> None:
        self._reasoning_key = reasoning_key
        self._known: dict[bytes, _Edge | None] = {}

    def marked(self, message: Plain, number: int) -> Plain:
        """The turn with marks for its content, its reasoning and its calls' arguments."""
        mark = TURN.format(number)
        found = dict(message)
        for name in ("content", self._reasoning_key):
            if found.get(name):
                found[name] = mark
        found["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": _marked_arguments(call["function"]["arguments"], mark)},
            }
            for call in message["tool_calls"]
        ]
        return found

    def span(
        self,
        text: str,
        start: int,
        marks: tuple[int, int],
        message: Plain,
        stop: str | None,
        args: bytes,
        render: Render,
    ) -> tuple[int, int] | None:
        """From the end of the generation prompt to the stop token, which is the next segment's first.

        text: a history in which the turn's marks stand at `marks`, behind `start`. args: what else decides how it is rendered.
        """
        if stop is None:
            return None
        forms = [message]
        if message.get(self._reasoning_key):  # which the template may leave out
            forms.append({name: value for name, value in message.items() if name != self._reasoning_key})
        for form in forms:
            edge = self._edge(form, stop, args, render)
            if edge is None:
                continue
            before, behind = edge
            first = marks[0] - len(before)
            if first >= start and text.startswith(before, first) and text.startswith(behind, marks[1]):
                return first, marks[1] + len(behind) - len(stop)
        return None

    def _edge(self, message: Plain, stop: str, args: bytes, render: Render) -> _Edge | None:
        turn = self.marked(message, 0)
        key = orjson.dumps([turn, stop]) + args
        if key not in self._known:
            if len(self._known) >= _MAX_EDGES:
                del self._known[next(iter(self._known))]
            self._known[key] = _learned(turn, stop, render)
        return self._known[key]


def _learned(turn: Plain, stop: str, render: Render) -> _Edge | None:
    try:
        asked, wrote = render([PROBE], True), render([PROBE, turn], False)
    except TemplateError:
        return None
    marks = spans_of_marks(wrote).get(0)
    if marks is None or not wrote.startswith(asked) or marks[0] < len(asked):
        return None
    end = wrote.find(stop, marks[1])
    return None if end < 0 else (wrote[len(asked) : marks[0]], wrote[marks[1] : end + len(stop)])


def _marked_arguments(given: object, mark: str) -> object:
    """Arguments of the same kind: an object, or text."""
    return {mark: mark} if isinstance(given, dict) else f'{{"{mark}": "{mark}"}}'


def shows_by_calls(form: MessageForm, render: Callable[[Sequence[Plain]], str]) -> bool:
    """Whether a template treats what follows a turn with tool calls by those calls."""
    if not form.shows_calls:
        return False
    calls = (ToolCall(call_id="call_0123456789", name="probe", arguments='{"a": "b"}'),)
    said = [
        Message(role="user", content="a"),
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content="b", tool_call_id=calls[0].call_id),
        Message(role="assistant", content="c"),
        Message(role="user", content="d"),
    ]
    messages = [form.plain(message, lambda value: value) for message in said]
    try:
        whole = render(messages)
    except TemplateError:
        return False
    try:
        before, mark, behind = render([messages[0], plain_turn(0), *messages[2:]]).partition(TURN.format(0))
    except TemplateError:
        return True
    return bool(mark) and between(whole, (before, behind)) is None


def between(text: str, segments: Sequence[str]) -> tuple[str, ...] | None:
    """What stands between the segments in `text`, if it is made of them in order, anchored at both ends."""
    if not text.startswith(segments[0]):
        return None
    start = len(segments[0])
    found: list[str] = []
    for segment in segments[1:-1]:
        at = text.find(segment[:_SOUGHT_CHARS], start)
        if at >= 0 and not text.startswith(segment, at):
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
