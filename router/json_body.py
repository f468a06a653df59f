"""JSON that came from outside: a request's body, and what a model or an agent wrote as a tool's arguments.

In the flow: before anything looks at a value. Invariant: a value that got in can be walked, compared and written again by
recursion: it is nested no deeper than a limit, far below that of the interpreter and of the JSON writer (254).
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from rlagent.router.errors import invalid

# Objects and arrays within one another: more than any tool's schema, a quarter of what can be written again.
MAX_DEPTH: Final = 64
# Of a tool's arguments: they come back within a message of a body.
MAX_ARGUMENTS_DEPTH: Final = MAX_DEPTH - 16
# Integers that JSON carries exactly, and that every store has a column for.
MAX_INTEGER: Final = 2**53 - 1
_MAX_TEXT: Final = 200  # characters of an id that a client chooses
_NESTING: Final = (dict, list)  # looked through faster than a union of them
_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)

B = TypeVar("B", bound=BaseModel)


def check_no_nul(text: str) -> str:
    """A text that every store can look up. ValueError for others."""
    if "\0" in text:
        raise ValueError("a NUL character cannot be part of it")
    return text


_NO_NUL: Final = AfterValidator(check_no_nul)
# An id that is looked up, and one that a client chooses.
KnownId = Annotated[str, _NO_NUL, Field(json_schema_extra={"pattern": "^[^\\x00]*$"})]
ChosenId = Annotated[
    str, _NO_NUL, Field(min_length=1, max_length=_MAX_TEXT, json_schema_extra={"pattern": "^[^\\x00]*$"})
]
# Counts, steps and versions.
Natural = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


def load_json(content: bytes, *, constants: bool = False) -> Any:
    """A body's value. ApiError where it is no JSON, or nested too deep. `constants`: NaN and Infinity, as Python writes them, pass."""
    try:
        try:
            found = orjson.loads(content)
        except orjson.JSONDecodeError:
            if not constants:
                raise
            found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    if too_deep(found, MAX_DEPTH):
        raise invalid(f"the body is nested deeper than {MAX_DEPTH} objects and arrays; send a flatter one")
    return found


def too_deep(value: Any, limit: int) -> bool:
    """Whether objects and arrays stand within one another deeper than that."""
    level = [value] if isinstance(value, _NESTING) else []
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _NESTING)
        ]
        if not level:
            return False
    return True


def text_too_deep(text: str) -> bool:
    """Whether a JSON text of a tool's arguments is nested deeper than those may be."""
    if text.count("{") + text.count("[") <= MAX_ARGUMENTS_DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth > MAX_ARGUMENTS_DEPTH:
                return True
        elif token[0] in "]}":
            depth -= 1
    return False


def parse_body(content: bytes, shape: type[B], *, empty: bool = False) -> B:
    """A JSON body of a known shape; ApiError names the field. NaN and Infinity are let through to be named."""
    found = {} if empty and not content.strip() else load_json(content, constants=True)
    known = f"known fields: {', '.join(shape.model_fields)}"
    if not isinstance(found, dict):
        raise invalid(f"the body is a JSON {type(found).__name__}, not an object; {known}")
    try:
        return shape.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        same = [one for one in error.errors() if one["loc"][0] == first["loc"][0]]
        if len(same) > 1:  # none of a union's forms fits
            words = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in same))
            raise invalid(f"{field}: {first['input']!r:.200} is not {words}", field) from error
        name = ".".join(str(part) for part in first["loc"])
        given = "" if first["type"] == "missing" else f" (given: {first['input']!r:.200})"
        raise invalid(f"{name}: {first['msg']}{given}; {known}", field) from error
