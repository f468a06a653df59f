"""What a verifier looks at, and what a verifier is.

In the flow: a rollout function plays a task, describes what came of it as an `Attempt`, and asks a `Rubric` for the reward.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rlagent.errors import VerifierError

Message: TypeAlias = Mapping[str, Any]


class Endpoint(Protocol):
    """Where a model answers: all that a judge needs of a session."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What came of one task: the last answer, and the conversation that led to it where verifiers need it.

    `messages` are of OpenAI's chat form; `calls` names the recorded call (its `completion.id`) of each assistant message
    in order, and is needed for rewards by step alone. `session` is where a judge without an endpoint of its own asks.

    Example: Attempt(task={"question": "1 + 1?", "answer": "2"}, answer="It is 2.")
    """

    task: Mapping[str, Any]
    answer: str
    messages: tuple[Message, ...] = ()
    calls: tuple[str, ...] = ()
    session: Endpoint | None = None

    def field(self, name: str) -> Any:
        """A field of the task. VerifierError names what is missing."""
        if name not in self.task:
            raise VerifierError(f"the task has no field {name!r}; it has {', '.join(map(repr, self.task)) or 'none'}")
        return self.task[name]

    def steps(self) -> "list[tuple[str, Attempt]]":
        """Each recorded call with the attempt as it stood after it. VerifierError when calls and messages do not match."""
        places = [number for number, message in enumerate(self.messages) if message.get("role") == "assistant"]
        if len(places) != len(self.calls):
            raise VerifierError(
                f"the attempt has {len(places)} assistant messages and {len(self.calls)} calls; name one call (completion.id) each"
            )
        return [
            (call, replace(self, answer=text_of(self.messages[place]), messages=self.messages[: place + 1], calls=()))
            for call, place in zip(self.calls, places, strict=True)
        ]


Verifier: TypeAlias = Callable[[Attempt], Awaitable[float] | float]
"""A number for an attempt. A plain function runs where the rollout runs: for what is quick. What may hang is `Isolated`."""


@runtime_checkable
class Staged(Protocol):
    """A verifier with something to wait for (a process, a sandbox) that is not to count against its time."""

    @property
    def concurrency(self) -> int:
        """How many attempts it can look at side by side."""
        ...

    def ready(self) -> AbstractAsyncContextManager[Verifier]:
        """Wait for the place; what is given back verifies one attempt."""
        ...

    async def close(self) -> None:
        """End what it holds. Safe to repeat."""
        ...

    async def __call__(self, attempt: Attempt) -> float:
        """One attempt, without a time limit of its own: cancel it to end it."""
        async with self.ready() as verifier:
            value = verifier(attempt)
            return value if isinstance(value, float | int) else await value


def text_of(message: Message) -> str:
    """The text of a message whose content is a string, parts, or nothing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
