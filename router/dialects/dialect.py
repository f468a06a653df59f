"""What a wire format is: a body read as an Ask, a recorded call written as an answer, whole or streamed, and errors.

In the flow: completions_api.py, which exists once, is handed one of these for each path. Invariant: a dialect is made
of functions of their arguments alone; it decides nothing about history, sampling or recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.body import Body
from rlagent.router.errors import ApiError
from rlagent.router.parse import Event
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What is known of a call when its stream begins."""

    call_id: str
    started_at: float  # unix seconds
    prompt_len: int
    ask: Ask
    tokenizer: Tokenizer


class StreamWriter(Protocol):
    """Server-sent events of one answer: opening, deltas as they are read, then closing or failure."""

    def opening(self) -> bytes:
        """What is sent before the first delta."""
        ...

    def deltas(self, number: int, events: Sequence[Event]) -> bytes:
        """What was read of choice `number`."""
        ...

    def closing(self, call: Call) -> bytes:
        """What is sent once the call is committed; its last event ends the answer."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What is sent instead of the closing, in the form that the SDK raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One wire format.

    `path` is where it is served below /v1; `body` the fields that it reads; ApiError of `parse` names the field and what
    to do; `error` is the body of a refusal; `request_id` the header in which its SDK looks for the id of a request.
    """

    path: str
    body: type[Body]
    parse: Callable[[bytes, Mapping[str, str]], Ask]
    answer: Callable[[Call, Ask, Tokenizer], Json]
    stream: Callable[[Begun], StreamWriter]
    error: Callable[[ApiError], Json]
    request_id: str = "x-request-id"
