"""The command `rlagent`: its subcommands (rlagent/commands), and how it ends when something is wrong.

Heavy imports stand inside the commands, so that `--help` and `serve` start without torch.
"""

import os
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from rlagent.commands import look, run
from rlagent.commands.session import session_app
from rlagent.ending import plain_errors

app = typer.Typer(
    name="rlagent", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Reinforcement learning of agents with the control inverted: point an agent's base_url at the router, and its calls "
    "become trajectories that a learner trains on.",
)  # fmt: skip
app.add_typer(session_app, name="session")
for command in (run.serve, run.train, look.doctor, look.inspect, look.dump, look.export):
    app.command()(command)


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the versions and leave.")] = False,
) -> None:
    """Nothing but the options of the program itself."""
    if show_version:
        version()
        raise typer.Exit


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def engine(context: typer.Context) -> None:
    """Run one embedded engine: SGLang's HTTP surface on a small torch model. See `rlagent engine --help`."""
    from rlagent.engine.main import main as run_engine

    raise typer.Exit(run_engine(context.args))


@app.command()
def version() -> None:
    """Print the versions of rlagent and what it stands on."""
    for name in ("rlagent-rl", "torch", "megatron-core", "transformers"):
        print(f"{name} {installed_version(name)}")


def main() -> None:
    """Entry point: errors of the user's making are printed without a traceback."""
    for descriptor in range(3):  # one that is closed would be given to a socket, which libuv then takes for a terminal
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    with plain_errors():
        app()


if __name__ == "__main__":
    main()
