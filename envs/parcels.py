"""Parcels: find the pickup code of a customer's parcel with three tools, each needing what the one before it told.

A user asks for the code. `find_order` turns the customer into an order, `track_parcel` the order into a depot,
`pickup_code` both into the code, and the agent's last message must be "The code is 57." to the letter. Orders, depots
and codes are drawn at random for every task: nothing can be known without looking, a blind guess is right once in 90.

Where it stands: the agent (examples/parcels/rollout.py) holds a `World` and asks it; neither knows of training.
Invariant: a hash of its customer and order alone says whether a task is held out, so the splits never share a pair.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

Split = Literal["train", "heldout"]

CUSTOMERS: Final = (
    "Ada", "Ben", "Cleo", "Dina", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena", "Mia",
    "Nils", "Otto", "Pia", "Quin", "Rosa", "Sven", "Tara", "Udo", "Vera", "Wim", "Xena", "Yara", "Zoe",
)  # fmt: skip
DEPOTS: Final = (
    "Ash", "Birch", "Cedar", "Elm", "Fir", "Hazel", "Juniper", "Kale",
    "Larch", "Maple", "Oak", "Pine", "Rowan", "Sorrel", "Thyme", "Yew",
)  # fmt: skip
NUMBERS: Final = range(10, 100)
"""Orders and codes. Two digits: one token each, and a blind guess is right in 1 of 90."""

HELDOUT_ONE_IN: Final = 5
"""One (customer, order) pair in this many is held out: 20 % of 2,340 pairs, each with 1,440 depots and codes."""

MAX_TURNS: Final = 5
"""Completions an agent may ask for: three calls, one answer, one to spare."""


class InvalidCallError(ValueError):
    """A call that the world cannot execute: an unknown tool, malformed arguments, or something that does not exist.

    It ends the episode.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question and the world behind it.

    Example: Task(id="train-0-7", customer="Mia", order=41, depot="Kale", code=57) asks
    "What is the pickup code of Mia's parcel?" and is answered by "The code is 57."
    """

    id: str
    customer: str
    order: int
    depot: str
    code: int

    @property
    def question(self) -> str:
        return f"What is the pickup code of {self.customer}'s parcel?"

    @property
    def answer(self) -> str:
        return answer_with(self.code)

    def to_line(self) -> str:
        """The task as one line of a task file, enough to rebuild the world."""
        return json.dumps(asdict(self))

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Task:
        """The task that a parsed line of a task file describes. Raises ValueError on a missing or mistyped field."""

        def text(field: str) -> str:
            value = record.get(field)
            if not isinstance(value, str):
                raise ValueError(f"task field {field!r} must be a string, not {value!r}")
            return value

        def number(field: str) -> int:
            value = record.get(field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"task field {field!r} must be an integer, not {value!r}")
            return value

        return cls(
            id=text("id"),
            customer=text("customer"),
            order=number("order"),
            depot=text("depot"),
            code=number("code"),
        )


def answer_with(code: int) -> str:
    """How an agent says a code. Words come first, so that to answer instead of looking is one decision: one token."""
    return f"The code is {code}."


def split_of(customer: str, order: int) -> Split:
    """Which set a customer's order belongs to, whatever the seed."""
    return "heldout" if zlib.crc32(f"{customer} {order}".encode()) % HELDOUT_ONE_IN == 0 else "train"


def generate_tasks(split: Split, *, seed: int) -> Iterator[Task]:
    """An endless stream of tasks of one split; the same seed gives the same stream."""
    rng = random.Random(f"parcels {split} {seed}")
    num_made = 0
    while True:
        customer, order = rng.choice(CUSTOMERS), rng.choice(NUMBERS)
        depot, code = rng.choice(DEPOTS), rng.choice(NUMBERS)
        if split_of(customer, order) == split:
            yield Task(id=f"{split}-{seed}-{num_made}", customer=customer, order=order, depot=depot, code=code)
            num_made += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the tools can see of one task. Calls do not change it."""

    task: Task

    def call(self, name: str, arguments: str) -> str:
        """Execute a tool call as a model wrote it (`arguments` is JSON text) and return its result as JSON text.

        World(task=...).call("find_order", '{"customer": "Mia"}') == '{"order": 41}'. Raises InvalidCallError.
        """
        if name not in _PARAMETERS:
            raise InvalidCallError(f"no tool is called {name!r}")
        try:
            given = json.loads(arguments)
        except ValueError as error:
            raise InvalidCallError(f"the arguments of {name} are not JSON: {arguments!r}") from error
        if not isinstance(given, dict) or set(given) != set(_PARAMETERS[name]):
            raise InvalidCallError(f"{name} takes {', '.join(_PARAMETERS[name])}, not {arguments}")
        task = self.task
        known: dict[str, object] = {"customer": task.customer, "order": task.order, "depot": task.depot}
        for parameter, value in given.items():
            # A type of its own is checked too, because True == 1 and 41.0 == 41.
            if type(value) is not type(known[parameter]) or value != known[parameter]:
                raise InvalidCallError(f"{name}: there is no {parameter} {value!r}")
        results: dict[str, dict[str, object]] = {
            "find_order": {"order": task.order},
            "track_parcel": {"depot": task.depot},
            "pickup_code": {"code": task.code},
        }
        return json.dumps(results[name])


def verify(task: Task, answer: str | None) -> float:
    """1.0 if the agent's last message is the task's answer to the letter, otherwise 0.0."""
    return 1.0 if answer == task.answer else 0.0


_TYPES: Final = {"customer": "string", "order": "integer", "depot": "string"}

_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "find_order": ("customer",),
    "track_parcel": ("order",),
    "pickup_code": ("depot", "order"),
}

_DESCRIPTIONS: Final = {
    "find_order": "The order of a customer",
    "track_parcel": "The depot that holds an order",
    "pickup_code": "The code to pick up an order at a depot",
}


def _schema(name: str) -> ChatCompletionFunctionToolParam:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": _DESCRIPTIONS[name],
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": _TYPES[parameter]} for parameter in _PARAMETERS[name]},
                "required": list(_PARAMETERS[name]),
            },
        },
    }


TOOLS: Final = tuple(_schema(name) for name in _PARAMETERS)
"""The three tools as OpenAI's chat completions take them."""
