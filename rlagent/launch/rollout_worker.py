"""A rollout worker: a process that loads the rollout function once and runs it for the driver.

`python -m rlagent.launch.rollout_worker FD PARENT_PID`, started by rlagent.launch.rollout_pool. The driver sends JSON jobs and reads
JSON outcomes. `async def` functions run side by side; a plain `def` occupies the process, so that a timeout can end it.
"""

import asyncio
import inspect
import os
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import orjson
import uvloop

from rlagent.client import SessionHandle
from rlagent.errors import LoadError
from rlagent.launch.child import adopt_connection
from rlagent.loading import load_function
from rlagent.rollout import Outcome, RolloutFunction, run_rollout


def main(argv: list[str]) -> None:
    """Load the function named by the first message, then answer jobs until the pipe closes."""
    connection = adopt_connection(argv)
    hello = orjson.loads(connection.recv_bytes())
    sys.path.insert(0, os.getcwd())
    try:
        function = load_function(hello["function"], what="rollout function")
    except LoadError as error:
        connection.send_bytes(orjson.dumps({"error": str(error)}))
        return
    connection.send_bytes(orjson.dumps({"is_async": inspect.iscoroutinefunction(function)}))
    uvloop.run(_answer(connection, function, hello["timeout_s"]))


async def _answer(connection: Connection, function: RolloutFunction, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    running: set[asyncio.Task[None]] = set()

    async def run(job: dict[str, Any]) -> None:
        outcome = await run_rollout(function, job["task"], SessionHandle(**job["session"]), timeout_s)
        connection.send_bytes(orjson.dumps({"job": job["job"], **_to_json(outcome)}))

    def read() -> None:
        try:
            job = orjson.loads(connection.recv_bytes())
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            ended.set_result(None)
            return
        task = loop.create_task(run(job))
        running.add(task)
        task.add_done_callback(running.discard)

    loop.add_reader(connection.fileno(), read)
    await ended
    for task in running:
        task.cancel()


def _to_json(outcome: Outcome) -> dict[str, Any]:
    reward = outcome.reward
    return {
        "status": outcome.status,
        "error": outcome.error,
        "reward": None if reward is None else asdict(reward),
    }


if __name__ == "__main__":
    main(sys.argv)
