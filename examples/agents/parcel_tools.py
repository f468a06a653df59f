"""The tools of the parcels task (rlagent.envs.parcels) as typed Python functions, which every agent framework here can take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlagent.envs.parcels import Task, World, verify

INSTRUCTIONS = "Look the pickup code up with the tools, then answer in the form: The code is 57."


class Tools(NamedTuple):
    """Plain functions over one task's world. One that is called wrongly raises, and the framework tells the model."""

    find_order: Callable[[str], str]
    track_parcel: Callable[[int], str]
    pickup_code: Callable[[str, int], str]


def parcel(task: Mapping[str, object]) -> tuple[str, Tools, Callable[[object], float]]:
    """A task's question, its tools, and what turns the agent's final answer into a reward."""
    made = Task.from_record(task)
    world = World(task=made)

    def find_order(customer: str) -> str:
        """The order of a customer.

        Args:
            customer: The customer's name.
        """
        return world.call("find_order", json.dumps({"customer": customer}))

    def track_parcel(order: int) -> str:
        """The depot that holds an order.

        Args:
            order: The order's number.
        """
        return world.call("track_parcel", json.dumps({"order": order}))

    def pickup_code(depot: str, order: int) -> str:
        """The code to pick up an order at a depot.

        Args:
            depot: The depot's name.
            order: The order's number.
        """
        return world.call("pickup_code", json.dumps({"depot": depot, "order": order}))

    return made.question, Tools(find_order, track_parcel, pickup_code), lambda answer: verify(made, str(answer))
