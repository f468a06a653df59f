"""What the requests of all dialects have in common: JSON checked against a model, refusals by name, stops, retries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlagent.router.chat_template import TOKEN_NAMES
from rlagent.router.errors import invalid
from rlagent.router.json_body import load_json

# OpenAI's own limit, for every dialect.
MAX_STOPS: Final = 4
OTHER_SAMPLING: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")
_MAX_DIGITS: Final = 9  # of a count of retries
_RESERVED_ARGS: Final = (
    "messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "self", *TOKEN_NAMES
)  # fmt: skip


class Body(BaseModel):
    """The fields that have an effect; `model_extra` holds the others."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], content: bytes) -> B:
    """A request's body. ApiError names the field."""
    found = load_json(content)
    if not isinstance(found, dict):
        raise invalid(f"the body is a JSON {type(found).__name__}, not an object")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        given = "" if first["type"] == "missing" else f" (given: {first['input']!r:.200})"
        raise invalid(f"{name}: {first['msg']}{given}", str(first["loc"][0])) from error


def ignored(body: Body) -> dict[str, Any]:
    """The fields that are recorded and have no effect."""
    return {name: value for name, value in (body.model_extra or {}).items() if value is not None}


def refuse(body: Body, reasons: Mapping[str, str]) -> None:
    """400 for the first field that is given and cannot be honoured."""
    for name, why in reasons.items():
        if (body.model_extra or {}).get(name):
            raise invalid(f"{name} is not supported: {why}", name)


def read_stops(found: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Stop strings."""
    stops = (found,) if isinstance(found, str) else tuple(found or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise invalid(f"{name} takes at most {MAX_STOPS} strings, none of them empty", name)
    return stops


def read_template_args(found: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Arguments of the chat template, as SGLang and vLLM take them."""
    for name in _RESERVED_ARGS:
        if name in (found or {}):
            raise invalid(f"chat_template_kwargs.{name} is set by the router; leave it out", "chat_template_kwargs")
    return found or {}


def read_retry_count(headers: Mapping[str, str]) -> int:
    """How often the SDK has sent this request before."""
    header = headers.get("x-stainless-retry-count")
    return int(header) if header is not None and header.isdecimal() and len(header) <= _MAX_DIGITS else 0
