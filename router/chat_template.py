"""A model's chat template, rendered as transformers' apply_chat_template renders it, without importing transformers.

In the flow: render.py asks it for text. Templates come with models and are untrusted: they run in jinja2's immutable
sandbox and see plain JSON values only. Golden tests compare with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import orjson

from rlagent.errors import LoadError

_TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
# The tokens that transformers hands to a template by these names.
TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names that a dict has itself: what they mean in a template is the sandbox's to say.
_DICT_NAMES: Final = frozenset(dir(dict))
_MISSING: Final = object()


class TemplateError(Exception):
    """The template refused a conversation, in its own words."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for masks that we do not need: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Looks names up in a plain dict at once: the sandbox tries an attribute first, which costs more than all the rest."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute` in a template."""
        if type(obj) is not dict or attribute in _DICT_NAMES:
            return super().getattr(obj, attribute)
        found = obj.get(attribute, _MISSING)
        return self.undefined(obj=obj, name=attribute) if found is _MISSING else found


class ChatTemplate:
    """The template (or templates by name) of one model directory."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str], where: str) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise LoadError(
                f"the chat template of {where} is broken: {error}; use the one the model came with"
            ) from error
        for template in self._templates.values():
            template.globals = dict(template.globals)  # a chain of maps is copied, slowly, at every render
        self._tokens = dict(tokens)
        self.source = "\0".join(f"{name}\0{source}" for name, source in sorted(sources.items()))

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """From chat_template.jinja or tokenizer_config.json. LoadError, with the fix, when there is none."""
        config = _read_config(model_dir / _CONFIG_FILE)
        tokens = {name: _content(config[name]) for name in TOKEN_NAMES if config.get(name) is not None}
        found = config.get("chat_template")
        file = model_dir / _TEMPLATE_FILE
        if file.is_file():
            found = file.read_text(encoding="utf-8")
        if isinstance(found, list):
            sources = {entry["name"]: entry["template"] for entry in found}
        elif isinstance(found, str):
            sources = {"default": found}
        else:
            if not model_dir.is_dir():
                raise LoadError(f"model directory {str(model_dir)!r} does not exist")
            raise LoadError(
                f"the tokenizer in {str(model_dir)!r} has no chat template; put the model's template into {_TEMPLATE_FILE} "
                f"there (a base model has none: take the one of its instruct variant)"
            )
        return cls(sources, tokens, str(model_dir))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        args: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation's text. TemplateError when the template refuses it."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        given = {**self._tokens, **args}
        try:
            return template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateError(str(error) or type(error).__name__) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}; copy it again from the model") from error
    if not isinstance(found, dict):
        raise LoadError(f"{path} holds no JSON object; copy it again from the model")
    return found


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
