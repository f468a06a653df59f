"""A Python function as a tool: types give the schema, the docstring gives the descriptions, pydantic checks the arguments.

Invariant: the function sees arguments of the types that it names, or is not called; what was wrong is said by argument.
"""

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, PydanticSchemaGenerationError, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from rlagent.envs.tools.tool import Tool, ToolError
from rlagent.errors import ConfigError

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False


def function_tool(function: Callable[..., Any], *, name: str | None = None) -> Tool:
    """A tool from a plain or async function whose parameters all have types. ConfigError names the one that has none.

    Text that it returns is given as it is, anything else as JSON. A plain function runs where the rollout runs: for what is
    quick. It raises ToolError to tell the model something; any other exception ends the rollout.
    """
    name = name or function.__name__
    told = docstring_parser.parse(inspect.getdoc(function) or "")
    descriptions = {one.arg_name: " ".join((one.description or "").split()) for one in told.params}
    shape = _shape(function, name, descriptions)
    schema = shape.model_json_schema(schema_generator=_Untitled)
    schema.pop("title", None)
    words = [part for part in (told.short_description, told.long_description) if part]

    async def call(arguments: str) -> str:
        try:
            given = shape.model_validate_json(arguments.strip() or "{}", strict=True)
        except ValidationError as error:
            raise ToolError(f"{name}: {'; '.join(_problems(error))}. It takes {_takes(schema)}") from error
        result = function(**{alias: getattr(given, field) for field, alias in _aliases(shape)})
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else to_json(result).decode()

    return Tool(name=name, description="\n".join(words), parameters=schema, call=call)


def _shape(function: Callable[..., Any], name: str, descriptions: dict[str, str]) -> type[BaseModel]:
    """The arguments as a pydantic model. Its fields have names of their own, so that a parameter may be called `schema` or `_x`."""
    types = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in _NAMED:
            raise ConfigError(f"tool {name}: parameter {parameter} cannot be given by name; write each one out")
        if parameter.name not in types:
            raise ConfigError(
                f"tool {name}: parameter {parameter.name!r} has no type; write {parameter.name}: str, or what it is"
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        told = descriptions.get(parameter.name)
        fields[f"field_{number}"] = (
            types[parameter.name],
            Field(default, alias=parameter.name, description=told or None),
        )
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticSchemaGenerationError as error:
        raise ConfigError(
            f"tool {name}: {error}".splitlines()[0] + "; use types that JSON has, or pydantic models"
        ) from error


def _aliases(shape: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for field, info in shape.model_fields.items():
        assert info.alias is not None
        yield field, info.alias


def _problems(error: ValidationError) -> Iterator[str]:
    for one in error.errors(include_url=False):
        where = ".".join(str(part) for part in one["loc"])
        if one["type"] == "missing":
            yield f"{where} is missing"
        elif one["type"] == "extra_forbidden":
            yield f"there is no {where}"
        elif one["type"] == "json_invalid":
            yield "the arguments are not JSON"
        else:
            yield f"{where or 'the arguments'}: {one['msg']}, not {one['input']!r:.80}"


def _takes(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    names = [name if name in required else f"{name}?" for name in schema.get("properties", {})]
    return ", ".join(names) or "nothing"
