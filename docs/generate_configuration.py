"""Writes docs/configuration.md from the settings' own fields. `python docs/generate_configuration.py`; a test keeps it current."""

from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from rlagent.config import Config

HEAD = """# Settings

A run is determined by one tree of settings: a TOML file (`--config`), then `--set a.b=c`, then options such as `--model`.
Unknown keys and bad values are errors that name the field. Paths in a file are relative to it; `run.dir` is relative to the
current directory. This page is made by `docs/generate_configuration.py`.
"""


def rows(model: type[BaseModel], prefix: str) -> tuple[list[str], list[tuple[str, type[BaseModel]]]]:
    """Table rows of a section's own values, and its subsections."""
    lines, sections = [], []
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        nested = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if nested is not None:
            sections.append((f"{prefix}{name}", nested))
            continue
        kind = str(field.annotation) if get_args(field.annotation) else getattr(field.annotation, "__name__", "")
        for old, new in (("typing.Literal", "one of "), ("typing.Optional", ""), ("pathlib.", ""), ("|", "or")):
            kind = kind.replace(old, new)
        default = "" if field.default is None else "required" if field.is_required() else f"`{field.default}`"
        lines.append(f"| `{name}` | {kind} | {default} | {field.description or ''} |")
    return lines, sections


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    waiting: list[tuple[str, type[BaseModel]]] = [("", Config)]
    while waiting:
        name, model = waiting.pop(0)
        lines, sections = rows(model, f"{name}." if name else "")
        if lines:
            about = (model.__doc__ or "").strip()
            parts.append(
                f"\n## [{name}]\n\n{about}\n\n| setting | type | default | |\n|---|---|---|---|\n"
                + "\n".join(lines)
                + "\n"
            )
        waiting = sections + waiting
    return "".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(page(), encoding="utf-8")
