"""From sampled ids to what the agent sees: whole characters, stop strings trimmed, reasoning and tool calls apart.

In the flow: fed while a choice is generated (streaming) or once at its end; both give the same message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlagent.router.conversation import Message
from rlagent.router.families import HARMONY, HERMES, OutputForm
from rlagent.router.harmony import HarmonyParser
from rlagent.router.parse import Event, OutputParser, trim_stop
from rlagent.router.tokenizer import Detokenizer, Tokenizer
from rlagent.router.tool_calls import Tools
from rlagent.router.untagged import ForcedCallParser, TextParser
from rlagent.types import Choice, ParseStatus

# What an output is read as: a model's own form of reasoning and calls, one forced call, or text.
Form = Literal["tagged", "call", "text"]
_Parser = ForcedCallParser | HarmonyParser | OutputParser | TextParser


class ChoiceReader:
    """Reads one choice. `feed` new ids without the stop token, then `finish`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: bool,
        thinking: bool,
        stops: Sequence[str],
        form: Form = "tagged",
        family: OutputForm = HERMES,
        schemas: Tools = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._parser: _Parser
        match form:
            case "call":
                self._parser = ForcedCallParser()
            case "text":
                self._parser = TextParser()
            case "tagged" if family is HARMONY:
                self._parser = HarmonyParser(tools=tools)
            case "tagged":
                self._parser = OutputParser(tools=tools, thinking=thinking, form=family, schemas=schemas)
        self._stops = tuple(stops)
        self._held = ""  # what may be the start of a stop string
        self._stopped = False
        self._num_fed = 0

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """The events that these ids complete."""
        self._num_fed += len(ids)
        return self._read(self._detokenizer.feed(ids))

    def finish(self, choice: Choice) -> list[Event]:
        """The events that were held back, and those of ids that were not fed yet."""
        events = self.feed(visible_ids(choice)[self._num_fed :])
        events += self._read(self._detokenizer.finish())
        if not self._stopped:
            events += self._parser.feed(self._held)
        return events + self._parser.finish()

    @property
    def message(self) -> Message:
        """The message that is served."""
        return self._parser.message

    @property
    def status(self) -> ParseStatus:
        """How it parsed."""
        return self._parser.status

    def _read(self, text: str) -> list[Event]:
        if self._stopped or not text:
            return []
        text = self._held + text
        trimmed = trim_stop(text, self._stops)
        if len(trimmed) < len(text):
            self._stopped = True
            return self._parser.feed(trimmed)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return self._parser.feed(text[: len(text) - keep])


def visible_ids(choice: Choice) -> list[int]:
    """The output without the stop token that ended it."""
    ids: list[int] = choice.output_ids.tolist()
    ended = choice.finish_reason == "stop" and isinstance(choice.matched_stop, int)
    return ids[:-1] if ended and ids else ids


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters may begin the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
