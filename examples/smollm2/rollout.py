"""The agent of examples/parcels with a graded reward, so that a model that has never called a tool has something to climb.

"correct" is the task's own reward; "looked_up" the share of the three calls that were made rightly; "form" how alike the first message is
to the call that it should be (0 to 1, difflib's ratio), at a tenth: it is what differs between a raw model's rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Final, cast

import openai
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
)

from rlagent.client import SessionHandle
from rlagent.envs.parcels import MAX_TURNS, TOOLS, InvalidCallError, Task, World, verify

FORM_WEIGHT: Final = 0.1
LOOKED_UP_WEIGHT: Final = 0.4
NUM_CALLS: Final = 3


async def rollout(task: Mapping[str, object], session: SessionHandle) -> dict[str, float]:
    """Play one parcels task. A message that is neither a call nor the answer ends it, as a wrong call does."""
    parcel = Task.from_record(task)
    world = World(task=parcel)
    made: set[str] = set()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": parcel.question}]
    form, correct = 0.0, 0.0
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for turn in range(MAX_TURNS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            if turn == 0:
                form = likeness(message, parcel)
            if not message.tool_calls:
                correct = verify(parcel, message.content)
                break
            messages.append(cast(ChatCompletionAssistantMessageParam, message.to_dict()))
            try:
                messages += [answer(world, call, made) for call in message.tool_calls if call.type == "function"]
            except InvalidCallError:
                break
    looked_up = len(made) / NUM_CALLS
    return {"correct": correct, "looked_up": LOOKED_UP_WEIGHT * looked_up, "form": FORM_WEIGHT * form}


def likeness(message: ChatCompletionMessage, parcel: Task) -> float:
    """1.0 for a first message that calls find_order rightly; else how alike its text is to such a call."""
    wanted = f'<tool_call>{{"name": "find_order", "arguments": {{"customer": "{parcel.customer}"}}}}</tool_call>'
    called = [call.function for call in message.tool_calls or [] if call.type == "function"]
    said = "".join(f'<tool_call>{{"name": "{f.name}", "arguments": {f.arguments}}}</tool_call>' for f in called)
    return SequenceMatcher(None, (message.content or "") + said, wanted, autojunk=False).ratio()


def answer(world: World, call: ChatCompletionMessageFunctionToolCall, made: set[str]) -> ChatCompletionMessageParam:
    """A call's result, its name noted in `made`."""
    result = world.call(call.function.name, call.function.arguments)
    made.add(call.function.name)
    return {"role": "tool", "tool_call_id": call.id, "content": result}
