"""`rlagent serve` as a child of the driver: the same code, told to leave by the pipe's end.

`python -m rlagent.launch.serve_child FD PARENT_PID`. The driver sends the resolved config as TOML and gets the base URL.
"""

import asyncio
import os
import signal
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

import uvloop

from rlagent.config import Config, absolute_paths, build_config, dump_config
from rlagent.errors import RlagentError, RouterError
from rlagent.launch.child import Child, adopt_connection
from rlagent.run_directory import RunDirectory
from rlagent.serve import serve


@asynccontextmanager
async def serving(config: Config, run: RunDirectory) -> AsyncIterator[str]:
    """Run the router, the buffer and the engines as a child; yields the router's base URL."""
    child = Child("rlagent serve", "rlagent.launch.serve_child", log=run.logs / "serve.log")
    try:
        child.connection.send(dump_config(absolute_paths(config)))
        try:
            answer = await asyncio.to_thread(child.connection.recv)
        except (EOFError, OSError):
            raise RouterError(child.fate) from None
        if isinstance(answer, RlagentError):
            raise answer
        yield answer
    finally:
        await asyncio.to_thread(child.close)


async def serve_config(config: Config, connection: Connection) -> None:
    """Serve until the pipe closes; errors of the user's making travel back through it."""
    asyncio.get_running_loop().add_reader(connection.fileno(), os.kill, os.getpid(), signal.SIGTERM)
    try:
        await serve(
            model_dir=config.model_dir,
            router=config.router,
            sampling=config.sampling,
            engine=config.engine,
            buffer=config.buffer,
            buffer_path=config.buffer_path,
            ready=connection.send,
        )
    except RlagentError as error:
        connection.send(error)


def main(argv: list[str]) -> None:
    """Entry of the child."""
    connection = adopt_connection(argv)
    config = build_config(tomllib.loads(connection.recv()))
    uvloop.run(serve_config(config, connection))


if __name__ == "__main__":
    main(sys.argv)
