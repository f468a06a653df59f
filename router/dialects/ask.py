"""What an agent asks for, in whatever dialect it said so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlagent.router.conversation import Conversation
from rlagent.router.grammar import Grammar
from rlagent.router.reader import Form
from rlagent.router.sampling import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One completion request.

    `previous` is the id of the call whose history stands before these messages, but for the first `num_lead` of them,
    which are of this request only. `echo` is what the answer says of its request. `ignored` are fields that are recorded
    and have no effect here.
    """

    dialect: str
    id_prefix: str = "chatcmpl-"  # of the call's id, as the dialect's own servers mint it
    model: str
    conversation: Conversation
    asked: Asked
    previous: str | None = None
    num_lead: int = 0
    grammar: Grammar | None = None
    n: int = 1
    tools: bool = False  # whether tool calls are read from the output
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, Any] = field(default_factory=dict)
    body_digest: str = ""
    retry_count: int = 0

    @property
    def form(self) -> Form:
        """What the output is read as."""
        if self.conversation.prompt is not None:
            return "text"
        return "call" if self.grammar is not None and self.grammar.is_call else "tagged"
