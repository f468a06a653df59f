"""What models of each family write: calls that are read, calls that are malformed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlagent.router.families import FORMS
from rlagent.router.harmony import HarmonyParser
from rlagent.router.parse import OutputParser

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}}}
]  # fmt: skip
_DEEP = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_ONE = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"

CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", 'So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1.50}}\n</tool_call>', "So:", [("f", '{"a": 1.50}')]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3", '\n{ "type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    ("llama3", 'See.<|python_tag|>f.call(query="a b", n=2)', "See.", [("f", '{"query": "a b", "n": 2}')]),
    ("deepseek", _DEEP.format(_ONE.format('function<｜tool▁sep｜>f\n```json\n{"a": "x"}\n```') + "\n"
                              + _ONE.format("function<｜tool▁sep｜>g\n```json\n{}\n```")), "", [("f", '{"a": "x"}'), ("g", "{}")]),
    ("deepseek", "Ok " + _DEEP.format(_ONE.format('f<｜tool▁sep｜>{"a": 2}')), "Ok", [("f", '{"a": 2}')]),
    ("glm", "Ok\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\nb</arg_value>\n"
     "<arg_key>l</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
     "Ok", [("f", '{"s": "a\\nb", "l": [1]}')]),
    ("glm", "<tool_call>f</tool_call>", "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]', "",
     [("f", '{"a": "]"}'), ("g", "{}")]),
    ("mistral", 'Ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', "Ok", [("f", '{"a": 1}'), ("g", "{}")]),
    ("harmony", '<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
     "", [("f", '{"a": 1}')]),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', "", [("f", '{"a": 1}')]),
]  # fmt: skip

MALFORMED: list[tuple[str, str]] = [
    ("hermes", "a <tool_call>f(x)</tool_call> b"),
    ("llama3", '{"name": "f", "parameters": {"a"'),
    ("llama3", "x <|python_tag|>import os"),
    ("llama3", "<|python_tag|>f.call(open('x'))"),
    ("deepseek", _DEEP.format(_ONE.format("function<｜tool▁sep｜>f\n```json\nnone\n```"))),
    ("deepseek", "a<｜tool▁calls▁begin｜>" + _ONE.format('f<｜tool▁sep｜>{"a": 2}')),
    ("glm", "<tool_call>f\n<arg_key>s</arg_key></tool_call>"),
    ("glm", "<tool_call>f\n<arg_key>s</arg_key><arg_value>1</arg_value>"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS]f"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{oops"),
    ("harmony", " to=python<|channel|>commentary code<|message|>print()<|call|>"),
]


def parser_of(family: str, numbers: Iterator[int], *, tools: bool = True) -> OutputParser | HarmonyParser:
    """A family's parser, which numbers its calls."""

    def mint() -> str:
        return f"c{next(numbers)}"

    if family == "harmony":
        return HarmonyParser(tools=tools, mint=mint)
    form = next(form for form in FORMS.values() if form.name == family)
    return OutputParser(tools=tools, form=form, schemas=TOOLS, mint=mint)
