"""The history that a request names by the id of its last answer, told again from what was recorded.

In the flow: the recorder completes such a request's conversation before it is planned. Invariant: reasoning and the ids
of tool calls are those that were served, so that the request extends the recorded turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson

from rlagent.router.conversation import Conversation, Message
from rlagent.router.errors import invalid
from rlagent.types import Call


def continued(conversation: Conversation, num_lead: int, previous: str, calls: Mapping[str, Call]) -> Conversation:
    """The conversation behind call `previous`, its own first `num_lead` messages in front. 400 for an unknown id."""
    call = calls.get(previous)
    if call is None:
        raise invalid(
            f"Previous response with id {previous!r} not found: a session's requests go on from its own answers only",
            "previous_response_id",
            "previous_response_not_found",
        )
    known = [*_sent(call, calls), _messages(call.served)[0]][orjson.loads(call.client).get("num_lead", 0) :]
    sent = conversation.messages
    return replace(conversation, messages=(*sent[:num_lead], *known, *sent[num_lead:]))


def _sent(call: Call, calls: Mapping[str, Call]) -> Sequence[Message]:
    """All messages of a call's prompt."""
    pieces: list[list[Message]] = []
    while True:
        pieces.append(_messages(call.messages))
        if call.parent is None:
            return [message for piece in reversed(pieces) for message in piece]
        parent = calls[call.parent.call_id]
        pieces.append([_messages(parent.served)[call.parent.choice]])
        call = parent


def _messages(content: bytes) -> list[Message]:
    return [Message.from_json(body) for body in orjson.loads(content)]
