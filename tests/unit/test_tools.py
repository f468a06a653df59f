"""Tools: what a function's types and docstring become, and what a model is told of its arguments."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rlagent.envs.tools import Toolbox, ToolError, function_tool
from rlagent.errors import ConfigError


class Place(BaseModel):
    street: str
    number: int = 1


@dataclass
class Parcel:
    depot: str
    code: int


def find(customer: str, size: Literal["small", "large"] = "small", at: Place | None = None) -> Parcel:
    """Find a parcel.

    Looks everywhere.

    Args:
        customer: whose it is,
            by first name
        size: how large
    """
    if customer != "Mia":
        raise ToolError(f"there is no customer {customer!r}")
    return Parcel(depot="Kale" if at is None else at.street, code=57 if size == "small" else 58)


async def waits(seconds: float) -> str:
    """:param seconds: how long"""
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def odd(schema: int, model_dump: list[int], _x: bool = True) -> list[Any]:
    return [schema, model_dump, _x]


def test_types_and_docstring_become_the_schema() -> None:
    schema = function_tool(find).schema["function"]
    assert schema["name"] == "find"
    assert schema["description"] == "Find a parcel.\nLooks everywhere."
    parameters = schema["parameters"]
    assert parameters["properties"]["customer"] == {"type": "string", "description": "whose it is, by first name"}
    assert parameters["properties"]["size"] == {
        "type": "string", "enum": ["small", "large"], "default": "small", "description": "how large",
    }  # fmt: skip
    assert (parameters["required"], parameters["additionalProperties"]) == (["customer"], False)
    assert "title" not in json.dumps(parameters["properties"])
    assert function_tool(waits).parameters["properties"]["seconds"]["description"] == "how long"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("find", '{"customer": "Mia"}', '{"depot":"Kale","code":57}'),
        ("find", '{"customer": "Mia", "size": "large", "at": {"street": "Elm"}}', '{"depot":"Elm","code":58}'),
        ("waits", '{"seconds": 0}', "waited 0.0"),
        ("odd", '{"schema": 1, "model_dump": [2], "_x": false}', "[1,[2],false]"),
    ],
)
async def test_a_call_is_answered(name: str, arguments: str, text: str) -> None:
    answer = await Toolbox([find, waits, odd]).call(name, arguments)
    assert (answer.text, answer.ok) == (text, True)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("find", "{}", "Error: find: customer is missing. It takes customer, size?, at?"),
        ("find", '{"customer": 3}', "customer: Input should be a valid string, not 3"),
        ("find", '{"customer": "Mia", "sise": "small"}', "there is no sise"),
        ("find", '{"customer": "Mia", "size": "huge"}', "size: Input should be 'small' or 'large', not 'huge'"),
        ("find", '{"customer": "Mia", "at": {"street": 1}}', "at.street: Input should be a valid string, not 1"),
        ("find", '{"customer": "Mia"', "the arguments are not JSON"),
        ("find", "[]", "the arguments: Input should be"),
        ("find", '{"customer": "Bob"}', "Error: there is no customer 'Bob'"),
        ("odd", '{"schema": "1", "model_dump": []}', "schema: Input should be a valid integer, not '1'"),
        ("lose", "{}", "Error: there is no tool 'lose'; there are find, waits, odd"),
        ("waits", '{"seconds": 60}', "Error: waits took longer than 0.01 s"),
    ],
)
async def test_what_is_wrong_is_said(name: str, arguments: str, words: str) -> None:
    answer = await Toolbox([find, waits, odd], timeout_s=0.01).call(name, arguments)
    assert not answer.ok
    assert words in answer.text


@given(st.text(max_size=40) | st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["customer", "size", "at", "x"]), inner, max_size=3)
    ).map(json.dumps))  # fmt: skip
def test_any_arguments_are_answered(arguments: str) -> None:
    assert asyncio.run(Toolbox([find]).call("find", arguments)).text


async def test_each_call_of_a_message_is_answered_in_order() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"customer": "Mia"}'}},
        {"id": "b", "type": "custom", "custom": {"name": "x", "input": ""}},
    ]
    answers = await Toolbox([find]).answer(calls)
    assert [message["tool_call_id"] for message in answers] == ["a", "b"]
    assert answers[0]["content"] == '{"depot":"Kale","code":57}'
    assert "no tool 'custom'" in answers[1]["content"]
    assert await Toolbox([find]).answer(None) == []


async def test_a_bug_of_a_tool_ends_the_rollout() -> None:
    def broken(x: int) -> int:
        return x // 0

    with pytest.raises(ZeroDivisionError):
        await Toolbox([broken]).call("broken", '{"x": 1}')


def test_functions_that_cannot_be_tools_are_refused() -> None:
    def untyped(x) -> None: ...  # type: ignore[no-untyped-def]
    def many(*x: int) -> None: ...
    def strange(x: asyncio.Event) -> None: ...

    with pytest.raises(ConfigError, match="tool untyped: parameter 'x' has no type"):
        function_tool(untyped)
    with pytest.raises(ConfigError, match="cannot be given by name"):
        function_tool(many)
    with pytest.raises(ConfigError, match="use types that JSON has"):
        function_tool(strange)
    with pytest.raises(ConfigError, match="a name of its own"):
        Toolbox([find, find])
