"""The command line: serve, train, engine, session, doctor, inspect, dump, export, version.

Heavy imports stand inside the commands, so that `--help` and `serve` start without torch.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlagent.errors import ConfigError, LoadError, RlagentError, Terminated

app = typer.Typer(
    name="rlagent", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Reinforcement learning of agents with the control inverted: point an agent's base_url at the router, and its calls "
    "become trajectories that a learner trains on.",
)  # fmt: skip
session_app = typer.Typer(no_args_is_help=True, help="Make, finish and look at sessions of a running router.")
app.add_typer(session_app, name="session")

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


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the versions and leave.")] = False,
) -> None:
    """Nothing but the options of the program itself."""
    if show_version:
        version()
        raise typer.Exit


@app.command()
def serve(
    model: ModelOption = None,
    config: ConfigOption = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="embedded: start engines here; sglang: start SGLang servers; attach: use those of --engine-url."
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="A flag for sglang.launch_server, e.g. --engine-arg=--mem-fraction-static=0.8. Repeatable."),
    ] = None,
    engine_url: Annotated[
        list[str] | None, typer.Option(help="A running SGLang-compatible server. Repeatable.", metavar="URL")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    buffer: Annotated[
        Path | None, typer.Option(help="The data buffer's SQLite file; default RUN_DIR/buffer.db.", metavar="FILE")
    ] = None,
    buffer_url: Annotated[
        str | None,
        typer.Option(help="PostgreSQL database that several replicas share, instead of the file.", metavar="URL"),
    ] = None,
    admin_key: AdminKeyOption = None,
    settings: SetOption = None,
) -> None:
    """Serve the router: OpenAI-compatible, in front of the engines, recording every call into the data buffer."""
    import uvloop

    from rlagent.config import load_config
    from rlagent.serve import serve as serve_router

    if engine_url and engine is None:
        engine = "attach"
    resolved = load_config(
        config, settings or (),
        {"model.path": model, "engine.kind": engine, "engine.urls": engine_url, "engine.sglang.args": engine_arg,
         "router.host": host, "router.port": port, "router.admin_key": admin_key, "buffer.path": buffer,
         "buffer.url": buffer_url},
    )  # fmt: skip
    path = resolved.buffer_path
    path.parent.mkdir(parents=True, exist_ok=True)
    uvloop.run(
        serve_router(
            model_dir=resolved.model_dir, router=resolved.router, sampling=resolved.sampling, engine=resolved.engine,
            buffer=resolved.buffer, buffer_path=path, ready=_say_ready,
        )
    )  # fmt: skip


def _say_ready(url: str) -> None:
    print(f"rlagent is serving at {url}", f"  agents:  OPENAI_BASE_URL={url}/v1", sep="\n", flush=True)


@app.command()
def train(
    config: ConfigOption = None,
    model: ModelOption = None,
    rollout_function_path: Annotated[
        str | None,
        typer.Option(help="The rollout function. None: agents come from outside.", metavar="FILE.PY:FUNCTION"),
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Tasks to train on, JSON lines.", metavar="FILE")] = None,
    router: Annotated[
        str | None, typer.Option(help="A running `rlagent serve`; default: start one.", metavar="URL")
    ] = None,
    admin_key: AdminKeyOption = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run leaves its files.", metavar="DIR")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")] = False,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Collect batches and their rewards; no learner, no publishing.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Train again on the batches of this run, under its settings and --set; no engines.", metavar="RUN"
        ),
    ] = None,
    settings: SetOption = None,
) -> None:
    """Train: lease batches of recorded trajectories, take learner steps, publish the weights to the engines."""
    import uvloop

    from rlagent.config import load_config
    from rlagent.train import train as run_training

    if replay is not None:
        _replay(
            replay, {"run.dir": run_dir}, settings or [], needless=(config, model, rollout_function_path, tasks, router)
        )
        return
    if resume and config is None and run_dir is not None and (run_dir / "config.toml").is_file():
        config = run_dir / "config.toml"
    resolved = load_config(
        config, settings or (),
        {"model.path": model, "rollout.function": rollout_function_path, "rollout.tasks": tasks, "router.admin_key": admin_key,
         "run.dir": run_dir},
    )  # fmt: skip
    console = Console()
    with _says_how_to_go_on(resolved.run.dir):
        run = uvloop.run(run_training(resolved, resume=resume, router_url=router, rollout_only=rollout_only))
    console.print(
        f"done: {run.path}: model/, metrics.jsonl, reward.png, buffer.db, checkpoints/", highlight=False, soft_wrap=True
    )


@contextmanager
def _says_how_to_go_on(run_dir: Path) -> Iterator[None]:
    """A run that was interrupted or failed names its checkpoint."""
    try:
        yield
    except (RlagentError, BaseExceptionGroup, KeyboardInterrupt) as error:
        saved = sorted((run_dir / "checkpoints").glob("step-*"))
        if saved and not any(isinstance(leaf, (ConfigError, Terminated)) for leaf in _leaves(error)):
            print(f"{saved[-1]} is saved: `rlagent train --resume --run-dir {run_dir}` goes on", file=sys.stderr)
        raise


def _replay(recorded: Path, overrides: dict[str, object], settings: list[str], *, needless: tuple[object, ...]) -> None:
    import uvloop

    from rlagent.config import load_config
    from rlagent.recorded import recorded_config
    from rlagent.replay import replay

    if any(option is not None for option in needless):
        raise ConfigError(
            "--replay takes model, tasks and settings from the recorded run: leave --config, --model, --tasks, --router and "
            "--rollout-function-path away; --set changes single settings"
        )
    if overrides["run.dir"] is None:
        raise ConfigError("--replay needs --run-dir: where the replay leaves its files")
    if Path(str(overrides["run.dir"])).absolute() == recorded.absolute():
        raise ConfigError(f"--run-dir is the recorded run {str(recorded)!r} itself; name a new directory")
    recorded_config(recorded)  # says what is wrong with the directory
    resolved = load_config(recorded / "config.toml", settings, overrides)
    found = uvloop.run(replay(resolved, recorded))
    verdict = (
        "every step is the recorded one, bit for bit" if found.num_equal == found.num_steps
        else f"the first {found.num_equal} steps are the recorded ones, bit for bit; step {found.num_equal + 1} differs"
    )  # fmt: skip
    print(f"replayed {found.num_steps} steps: {verdict}")


@app.command()
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
        _print_json(to_json(model, findings))
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


@app.command()
def inspect(
    source: Annotated[
        str, typer.Argument(help="A run's directory, a buffer's file, or a router's URL.", metavar="RUN_OR_URL")
    ],
    session_id: Annotated[
        str, typer.Argument(help="The session; `rlagent session show` lists the newest of a router.", metavar="SESSION")
    ],
    row: Annotated[int | None, typer.Option(help="Show one row only; 1 is the first.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="A line for each token: id, mask, logprob, version.")
    ] = False,
    model: ModelOption = None,
    admin_key: AdminKeyOption = None,
) -> None:
    """Show a session's trajectories: each token coloured by its mask and probability, with calls, versions and branches."""
    from rlagent.inspect import read, show

    recorded = asyncio.run(read(source, session_id, admin_key=admin_key, model=model))
    show(recorded, Console(), row=row, tokens=tokens)


@app.command()
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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def engine(context: typer.Context) -> None:
    """Run one embedded engine: SGLang's HTTP surface on a small torch model. See `rlagent engine --help`."""
    from rlagent.engine.main import main as run_engine

    raise typer.Exit(run_engine(context.args))


@session_app.command("new")
def session_new(
    router: RouterOption = "http://127.0.0.1:8000",
    task: Annotated[str | None, typer.Option(help="Task id.")] = None,
    group: Annotated[str | None, typer.Option(help="Group id: rollouts of one task that are compared.")] = None,
    group_size: Annotated[int | None, typer.Option(help="How many rollouts the group has.")] = None,
    no_train: Annotated[bool, typer.Option("--no-train", help="Record, but never train on it.")] = False,
    shell: Annotated[
        bool, typer.Option("--shell", help='Print shell lines that export it: eval "$(rlagent session new --shell)"')
    ] = False,
    admin_key: AdminKeyOption = None,
) -> None:
    """Open a session; prints its id, base_url and api_key."""

    async def run() -> tuple[dict[str, str], dict[str, str]]:
        from rlagent.client import RouterClient

        async with RouterClient(router, admin_key=admin_key) as client:
            handle = await client.new_session(task_id=task, group_id=group, group_size=group_size, train=not no_train)
        return handle.to_json(), {"RLAGENT_SESSION_ID": handle.session_id, **handle.environ()}

    found, environ = asyncio.run(run())
    if not shell:
        _print_json(found)
        return
    for name, value in environ.items():
        print(f"export {name}={shlex.quote(value)}")


@session_app.command("finish")
def session_finish(
    session_id: str,
    reward: Annotated[float | None, typer.Option(help="The episode's reward; replaces what was given before.")] = None,
    status: Annotated[str, typer.Option(help="completed, or why it failed.")] = "completed",
    router: RouterOption = "http://127.0.0.1:8000",
    admin_key: AdminKeyOption = None,
) -> None:
    """Seal a session and hand it to the learner."""

    async def run() -> dict[str, Any]:
        from rlagent.client import RouterClient

        async with RouterClient(router, admin_key=admin_key) as client:
            return await client.finish(session_id, reward=reward, status=status)

    _print_json(asyncio.run(run()))


@session_app.command("show")
def session_show(
    session_id: Annotated[str | None, typer.Argument(help="A session's id; none lists the newest.")] = None,
    trajectories: Annotated[
        bool, typer.Option("--trajectories", help="Show its rows: ids, mask, logprobs, versions.")
    ] = False,
    router: RouterOption = "http://127.0.0.1:8000",
    admin_key: AdminKeyOption = None,
) -> None:
    """Show a session with its calls, its trajectories, or the newest sessions."""

    async def run() -> Any:
        from rlagent.client import RouterClient

        async with RouterClient(router, admin_key=admin_key) as client:
            if session_id is None:
                return await client.sessions()
            if trajectories:
                return await client.trajectories(session_id)
            return {**await client.session(session_id), "calls": await client.calls(session_id)}

    _print_json(asyncio.run(run()))


@app.command()
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


@app.command()
def version() -> None:
    """Print the versions of rlagent and what it stands on."""
    for name in ("rlagent-rl", "torch", "megatron-core", "transformers"):
        print(f"{name} {installed_version(name)}")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def main() -> None:
    """Entry point: errors of the user's making are printed without a traceback."""
    for descriptor in range(3):  # one that is closed would be given to a socket, which libuv then takes for a terminal
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    try:
        app()
    except* Terminated as group:
        print(*_leaves(group), sep="\n", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except* RlagentError as group:
        for error in _leaves(group):
            Console(stderr=True).print(f"[bold red]error[/] {type(error).__name__}: ", end="")
            print(error, file=sys.stderr)
        sys.exit(1)


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions a group is made of, or the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


if __name__ == "__main__":
    main()
