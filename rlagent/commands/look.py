"""`rlagent doctor | inspect | dump | export`: what looks at models and at what was recorded, and changes neither.

Heavy imports stand inside the commands, so that `--help` starts without torch.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlagent.commands.options import AdminKeyOption, ModelOption, print_json
from rlagent.errors import ConfigError, LoadError


def doctor(
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Directory with tokenizer and chat template.", metavar="DIR")
    ],
    family: Annotated[
        str | None,
        typer.Option(
            help="Read answers as of this family, as router.family does; default: as the template's marks tell."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check that a model's chat template lets recorded tokens be reused turn after turn. Exit code 1 where it does not."""
    from rlagent.doctor import examine, proven, to_json
    from rlagent.router.families import FORMS

    if family is not None and family not in FORMS:
        raise ConfigError(f"--family is {family!r}; use one of {', '.join(FORMS)}")
    findings = examine(model, FORMS[family].name if family is not None else None)
    if as_json:
        print_json(to_json(model, findings))
    else:
        console, table = Console(), Table(box=None, pad_edge=False, title_justify="left")
        colours = {"ok": "green", "note": "yellow", "fails": "bold red"}
        for heading in ("", "check", "finding"):
            table.add_column(heading)
        for one in findings:
            table.add_row(f"[{colours[one.verdict]}]{one.verdict}[/]", one.name, escape(one.detail))
        console.print(table)
        verdict = "is proven for" if proven(findings) else "does not hold for"
        console.print(f"reuse of recorded tokens {verdict} {model}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if proven(findings) else 1)


def inspect(
    source: Annotated[
        str, typer.Argument(help="A run's directory, a buffer's file, or a router's URL.", metavar="RUN_OR_URL")
    ],
    session_id: Annotated[
        str | None, typer.Argument(help="The session; none lists the newest.", metavar="[SESSION]")
    ] = None,
    row: Annotated[int | None, typer.Option(help="Show one row only; 1 is the first.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="A line for each token: id, mask, logprob, version.")
    ] = False,
    model: ModelOption = None,
    admin_key: AdminKeyOption = None,
) -> None:
    """Show a session's trajectories: each token coloured by its mask and probability, with calls, versions and branches."""
    from rlagent.inspect import show, show_newest
    from rlagent.recorded_session import newest, read

    if session_id is None:
        show_newest(asyncio.run(newest(source, admin_key=admin_key)), Console())
        return
    recorded = asyncio.run(read(source, session_id, admin_key=admin_key, model=model))
    show(recorded, Console(), row=row, tokens=tokens)


def dump(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.")],
    step: Annotated[int, typer.Argument(help="The learner step; 1 is the first.")],
    out: Annotated[Path, typer.Option(help="Safetensors file to write.", metavar="FILE")],
) -> None:
    """Write the batch that a learner step was given: packed rows with masks, logprobs, advantages and weights."""
    from rlagent.replay import dump as dump_batch

    if out.exists():
        raise LoadError(f"--out {str(out)!r} exists already; name a new file")
    batch = asyncio.run(dump_batch(run_dir, step, out))
    print(
        f"step {step}: {batch.num_rows} rows, {batch.num_tokens} tokens, {batch.num_sampled} of them sampled -> {out}"
    )


def export(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.")],
    out: Annotated[Path, typer.Option(help="Hugging Face directory to write.", metavar="DIR")],
) -> None:
    """Copy a run's trained model (or, before its end, its newest snapshot) as a Hugging Face directory."""
    from rlagent.run_directory import RunDirectory

    run = RunDirectory(run_dir)
    sources = [run.model, *sorted(run.snapshots.glob("v*"), reverse=True)]
    source = next((path for path in sources if (path / "config.json").is_file()), None)
    if source is None:
        raise LoadError(f"{str(run_dir)!r} holds neither a trained model nor a snapshot; is it a run directory?")
    if out.exists():
        raise LoadError(f"--out {str(out)!r} exists already; name a new directory")
    shutil.copytree(source, out)
    print(f"{source} -> {out}")
