"""`rlagent session new | finish | show`: sessions of a running router, from a shell.

Another way to the same HTTP routes that RouterClient and the rollout workers take; nothing is decided here.
"""

import asyncio
import shlex
from typing import Annotated, Any

import typer

from rlagent.commands.options import AdminKeyOption, RouterOption, print_json

session_app = typer.Typer(no_args_is_help=True, help="Make, finish and look at sessions of a running router.")


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
        print_json(found)
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

    print_json(asyncio.run(run()))


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

    print_json(asyncio.run(run()))
