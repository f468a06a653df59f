"""What a recorded call served, for the answers of all dialects: messages, their events, token counts.

Invariant: an answer is a function of the request and the recorded call, so that a retry gets the same one.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from rlagent.router.conversation import Message
from rlagent.router.parse import Event, Text, Thought
from rlagent.router.reader import visible_ids
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call, Choice

_END_THINK: Final = "</think>"


def served(call: Call) -> list[Message]:
    """The messages a call was answered with, one a choice."""
    return [Message.from_json(body) for body in orjson.loads(call.served)]


def events_of(message: Message) -> list[Event]:
    """A message told again, for an answer that was made before."""
    events: list[Event] = [Thought(message.reasoning)] if message.reasoning else []
    if message.content:
        events.append(Text(message.content))
    return [*events, *message.tool_calls]


def num_sampled(call: Call) -> int:
    """Completion tokens: those sampled, stop tokens included."""
    return sum(len(choice.output_ids) for choice in call.choices)


def num_reasoning(call: Call, tokenizer: Tokenizer) -> int:
    """How many of the sampled tokens were reasoning, up to and including what closes it."""
    pairs = zip(call.choices, served(call), strict=True)
    return sum(_until_thought(choice, tokenizer) for choice, message in pairs if message.reasoning)


def token_logprobs(choice: Choice, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The sampled tokens' own logprobs as OpenAI shows them, the stop token's left out as its text is."""
    content = []
    for token, logprob in zip(visible_ids(choice), choice.logprobs.tolist(), strict=False):
        text = tokenizer.decode([token])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return content


def _until_thought(choice: Choice, tokenizer: Tokenizer) -> int:
    ids: list[int] = choice.output_ids.tolist()
    low, high = 1, len(ids)  # the fewest ids whose text holds the end; all of them where it never came
    while low < high:
        middle = (low + high) // 2
        if _END_THINK in tokenizer.decode(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low
