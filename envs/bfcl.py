"""The multi-turn simulators of bfcl-eval: file system, tickets, trading, travel, vehicle, messages, posts, mathematics.

    pip install --no-deps bfcl-eval==2026.3.23      # its pins are not ours; the simulators need none of them
    python -m rlagent.envs.bfcl multi_turn_base > tasks.jsonl
    rlagent train --rollout-function-path rlagent.envs.bfcl:rollout --tasks tasks.jsonl ...

A user asks for several things in turn; after each turn the world must be as the right calls leave it, and have shown what they show
(bfcl-eval's own checkers). In multi_turn_miss_func some tools come only with a later turn, where a new row begins.
Invariant: a model's call is a method by name with JSON arguments; nothing that it writes is evaluated.
"""

import ast
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import bfcl_eval
from bfcl_eval.constants import executable_backend_config as backends
from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

from rlagent.ending import plain_errors
from rlagent.envs.converse import converse
from rlagent.envs.tools import Tool, Toolbox, parsed_arguments
from rlagent.envs.verifiers.attempt import Endpoint
from rlagent.errors import ConfigError
from rlagent.types import Reward

CATEGORIES: Final = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_param", "multi_turn_miss_func")
_DATA: Final = Path(bfcl_eval.__file__).parent / "data"
_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "any": None}
_MORE_TOOLS: Final = [{"role": "user", "content": DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC}]
_MAX_CALLS: Final = 20  # completions a turn of the user, as bfcl-eval allows


class World:
    """The simulators of one task."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        self.shown: list[str] = []  # what all calls so far have answered
        for name in task["involved_classes"]:
            instance = getattr(importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backends.STATELESS_CLASSES:
                scenario = deepcopy(task["initial_config"].get(name, {}))
                instance._load_scenario(scenario, long_context="long_context" in task["id"])
            self.instances[name] = instance
            self._methods |= {one: getattr(instance, one) for one in dir(instance) if not one.startswith("_")}

    def call(self, name: str, given: Sequence[Any], named: Mapping[str, Any]) -> str:
        """A method's result as text, its failure too: as bfcl-eval shows them."""
        try:
            result = self._methods[name](*given, **named)
            text = (
                result if isinstance(result, str) else json.dumps(result) if isinstance(result, dict) else str(result)
            )
        except Exception as error:  # the boundary to the simulators: they raise for wrong arguments
            text = f"Error during execution: {error}"
        self.shown.append(text)
        return text

    def run(self, line: str) -> str:
        """A call as the data writes it: mv(source='a', destination='b')."""
        found = ast.parse(line, mode="eval").body
        if not isinstance(found, ast.Call) or not isinstance(found.func, ast.Name):
            raise ConfigError(f"{line!r} is no call of a simulator")
        named = {str(one.arg): ast.literal_eval(one.value) for one in found.keywords}
        return self.call(found.func.id, [ast.literal_eval(one) for one in found.args], named)


def toolbox(task: Mapping[str, Any], world: World, turn: int) -> Toolbox:
    """The tools that the task's simulators document, without those that come only after this turn, counted from 0."""
    missed = {name for at, names in task.get("missed_function", {}).items() if int(at) > turn for name in names}
    documents = [document for name in task["involved_classes"] for document in _documents(name)]
    return Toolbox([_tool(document, world) for document in documents if document["name"] not in missed])


def _tool(document: Mapping[str, Any], world: World) -> Tool:
    name = document["name"]

    async def call(arguments: str) -> str:
        return world.call(name, (), parsed_arguments(name, arguments))

    return Tool(name=name, description=document["description"], parameters=_schema(document["parameters"]), call=call)


async def rollout(task: Mapping[str, Any], session: Endpoint) -> Reward:
    """Play all turns. {"success": 1.0 if the world was right after each, "turns": 0.1 of the share that was}."""
    world, right = World(task), World(task)
    history: Sequence[Mapping[str, Any]] = ()
    num_right = 0
    for turn, (asked, wanted) in enumerate(zip(task["question"], task["ground_truth"], strict=True)):
        tools = toolbox(task, world, turn)
        attempt = await converse(session, task, [*history, *(asked or _MORE_TOOLS)], tools=tools, max_turns=_MAX_CALLS)
        history = attempt.messages
        num_right += as_wanted(world, right, wanted)
        if history[-1]["role"] == "tool":
            break  # it did not come to an end
    share = num_right / len(task["ground_truth"])
    return Reward(components={"success": float(share == 1.0), "turns": 0.1 * share})


def as_wanted(world: World, right: World, wanted: Sequence[str]) -> bool:
    """Whether the world is as these calls leave the right one, and has shown what they show. Plays them there."""
    shown = [right.run(line) for line in wanted]
    state = checker.state_checker(world.instances, right.instances)["valid"]
    return bool(not wanted or (state and checker.response_checker(world.shown, shown, 0)["valid"]))


def tasks(category: str) -> list[dict[str, Any]]:
    """All tasks of a category, with the calls that solve them. ConfigError for one that cannot be played."""
    if category not in CATEGORIES:
        raise ConfigError(f"category {category!r} cannot be played; use one of {', '.join(CATEGORIES)}")
    answers = {one["id"]: one["ground_truth"] for one in _lines(_DATA / "possible_answer" / f"BFCL_v4_{category}.json")}
    return [one | {"ground_truth": answers[one["id"]]} for one in _lines(_DATA / f"BFCL_v4_{category}.json")]


def _documents(name: str) -> list[dict[str, Any]]:
    return _lines(_DATA / "multi_turn_func_doc" / backends.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _schema(given: Any) -> Any:
    """JSON schema of the data's own dialect."""
    if isinstance(given, list):
        return [_schema(one) for one in given]
    if not isinstance(given, dict):
        return given
    kind = given.get("type")
    if not isinstance(kind, str):
        return {name: _schema(one) for name, one in given.items()}
    word = _TYPES.get(kind, kind)
    return {name: _schema(one) for name, one in given.items() if name != "type"} | ({"type": word} if word else {})


if __name__ == "__main__":
    with plain_errors():
        for made in tasks(sys.argv[1] if len(sys.argv) > 1 else CATEGORIES[0]):
            sys.stdout.write(json.dumps(made) + "\n")
