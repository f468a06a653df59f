"""The history that a request names by the id of its last answer, told again from what was recorded.

In the flow: the recorder completes such a request's conversation before it is planned. Invariant: reasoning and the ids
of tool calls are those that were served, so that the request extends the recorded turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from rlagent.router.conversation import Conversation, Message
from rlagent.router.errors import invalid
from rlagent.types import Call


def continued(conversation: Conversation, num_lead: int, previous: str, chain: Sequence[Call]) -> Conversation:
    """The conversation behind call `previous`, the last of `chain`, its own first `num_lead` messages in front.

    400 where there is no such call.
    """
    if not chain:
        raise invalid(
            f"Previous response with id {previous!r} not found: a session's requests go on from its own answers only",
            "previous_response_id",
            "previous_response_not_found",
        )
    known: list[Message] = []
    for call, behind in zip(chain, [*chain[1:], None], strict=True):
        choice = 0 if behind is None or behind.parent is None else behind.parent.choice
        known += [*_messages(call.messages), _messages(call.served)[choice]]
    known = known[orjson.loads(chain[-1].client).get("num_lead", 0) :]
    sent = conversation.messages
    return replace(conversation, messages=(*sent[:num_lead], *known, *sent[num_lead:]))


def _messages(content: bytes) -> list[Message]:
    return [Message.from_json(body) for body in orjson.loads(content)]
