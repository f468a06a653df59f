"""A conversation with a session's model: what the environments here share, and a start for your own rollout function.

In the flow: a rollout function says what comes after each of the model's messages; what was said comes back as an `Attempt`.
Invariant: messages go back as they were served, so that a session's calls stay one chain.
"""

import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import openai

from rlagent.envs.tools import Toolbox
from rlagent.envs.verifiers.attempt import Attempt, Endpoint, Message, text_of

Reply = Callable[[Message], Awaitable[Sequence[Message]]]
"""What follows a message of the model: tool results, an observation; nothing ends the conversation."""

_TLS: Final = ssl.create_default_context()  # reading the certificates is what makes a client slow


def client_of(session: Endpoint) -> openai.AsyncOpenAI:
    """An OpenAI client of a session. An async context manager."""
    http = openai.DefaultAsyncHttpxClient(verify=_TLS)
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)


async def converse(
    session: Endpoint, task: Mapping[str, Any], messages: Sequence[Message], *, reply: Reply | None = None,
    tools: Toolbox | None = None, max_turns: int = 16, model: str = "policy",
) -> Attempt:  # fmt: skip
    """Ask, reply, ask again, until nothing follows or `max_turns` completions were made.

    Without `reply`, tool calls are answered by `tools` and a message without any is the last. The attempt's answer is the text of
    the model's last message. openai's errors when the session cannot be asked.
    """
    box = tools or Toolbox([])

    async def answer(message: Message) -> Sequence[Message]:
        return await box.answer(message.get("tool_calls"))

    following = reply or answer
    history: list[Any] = [*messages]
    calls: list[str] = []
    said: Message = {}
    more: dict[str, Any] = {"tools": box.schemas} if box.schemas else {}
    async with client_of(session) as client:
        while len(calls) < max_turns:
            completion = await client.chat.completions.create(model=model, messages=history, **more)
            said = completion.choices[0].message.to_dict()
            calls.append(completion.id)
            history.append(said)
            news = await following(said)
            if not news:
                break
            history += news
    return Attempt(task=task, answer=text_of(said), messages=tuple(history), calls=tuple(calls), session=session)
