"""The agent of the demo: an ordinary program on the `openai` SDK that knows nothing of training.

It asks for the pickup code, lets the model call the three tools until it answers, and says how well that went.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final, Protocol, cast

import openai
from openai.types.chat import ChatCompletionAssistantMessageParam, ChatCompletionMessageParam

from rlagent.envs.parcels import MAX_TURNS, TOOLS, InvalidCallError, Task, World, verify

TLS: Final = ssl.create_default_context()
"""Shared, because reading the certificates is what makes a client cost 20 ms; the rest of one costs 0.1 ms."""


class Endpoint(Protocol):
    """Where the model answers: all that this agent needs of a session."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...


async def rollout(task: Mapping[str, object], session: Endpoint) -> float:
    """Play one task, a parsed line of tasks.jsonl. Returns 1.0 if the model answers with the code, otherwise 0.0."""
    parcel = Task.from_record(task)
    world = World(task=parcel)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": parcel.question}]
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, http_client=openai.DefaultAsyncHttpxClient(verify=TLS)
    ) as client:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            if not message.tool_calls:
                return verify(parcel, message.content)
            messages.append(cast(ChatCompletionAssistantMessageParam, message.to_dict()))
            for call in message.tool_calls:
                if call.type != "function":
                    return 0.0
                try:
                    result = world.call(call.function.name, call.function.arguments)
                except InvalidCallError:
                    return 0.0
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
