"""`rlagent serve` and `rlagent train`: options and a TOML file become settings, and what the user needs to know is said at the end.

Heavy imports stand inside the commands, so that `--help` and `serve` start without torch.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rlagent.commands.options import AdminKeyOption, ConfigOption, ModelOption, SetOption
from rlagent.errors import ConfigError, RlagentError, Terminated, leaves


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
    uvloop.run(
        serve_router(
            model_dir=resolved.model_dir, router=resolved.router, sampling=resolved.sampling, engine=resolved.engine,
            buffer=resolved.buffer, buffer_path=resolved.buffer_path, ready=_say_ready,
        )
    )  # fmt: skip


def _say_ready(url: str) -> None:
    print(
        f"rlagent is serving at {url}",
        f"  agents:  OPENAI_BASE_URL={url}/v1 or ANTHROPIC_BASE_URL={url}",
        sep="\n",
        flush=True,
    )


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
    if resume and config is None and run_dir is not None:
        config = run_dir / "config.toml"
        if not config.is_file():
            raise ConfigError(
                f"run directory {str(run_dir)!r} holds no run to resume; leave --resume away to start one"
            )
    resolved = load_config(
        config, settings or (),
        {"model.path": model, "rollout.function": rollout_function_path, "rollout.tasks": tasks, "router.admin_key": admin_key,
         "run.dir": run_dir},
    )  # fmt: skip
    console = Console()
    with _says_how_to_go_on(resolved.run.dir):
        run = uvloop.run(run_training(resolved, resume=resume, router_url=router, rollout_only=rollout_only))
    learned = "" if rollout_only else "model/, checkpoints/, "
    console.print(f"done: {run.path}: {learned}metrics.jsonl, reward.png, buffer.db", highlight=False, soft_wrap=True)


@contextmanager
def _says_how_to_go_on(run_dir: Path) -> Iterator[None]:
    """A run that was interrupted or failed names its checkpoint."""
    try:
        yield
    except (RlagentError, BaseExceptionGroup, KeyboardInterrupt) as error:
        saved = sorted((run_dir / "checkpoints").glob("step-*"))
        if saved and not any(isinstance(leaf, (ConfigError, Terminated)) for leaf in leaves(error)):
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
