"""What several commands share: their options, and how a value is printed."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of settings.", metavar="FILE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="One setting, e.g. -s learner.optimizer.lr=1e-4. Repeatable.", metavar="A.B=C"),
]
ModelOption = Annotated[Path | None, typer.Option("--model", "-m", help="Hugging Face model directory.", metavar="DIR")]
RouterOption = Annotated[str, typer.Option("--router", help="Base URL of a running router.", metavar="URL")]
AdminKeyOption = Annotated[
    str | None, typer.Option("--admin-key", envvar="RLAGENT_ADMIN_KEY", help="The router's admin key.")
]


def print_json(value: Any) -> None:
    """To standard output, for a person and for `jq`."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
