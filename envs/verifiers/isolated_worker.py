"""The process behind `Isolated`: loads the function once, answers attempts one after the other, dies with its parent.

`python -m rlagent.envs.verifiers.isolated_worker FD PARENT_PID`. First message: what to load and the memory it may have.
"""

import resource
import sys
import traceback
from collections.abc import Callable
from typing import Any

import orjson

from rlagent.envs.verifiers.attempt import Attempt
from rlagent.errors import LoadError
from rlagent.launch.child import adopt_connection
from rlagent.loading import load_function


def main(argv: list[str]) -> None:
    """Answer until the pipe closes."""
    connection = adopt_connection(argv)
    hello = orjson.loads(connection.recv_bytes())
    try:
        function = load_function(hello["function"], what="verifier")
    except LoadError as error:
        connection.send_bytes(orjson.dumps({"load_error": str(error)}))
        return
    if hello["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (hello["memory_bytes"], hello["memory_bytes"]))
    connection.send_bytes(b"{}")
    while True:
        try:
            asked = orjson.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(_answer(function, hello["arguments"], asked))


def _answer(function: Callable[..., Any], arguments: dict[str, Any], asked: dict[str, Any]) -> bytes:
    attempt = Attempt(task=asked["task"], answer=asked["answer"], messages=tuple(asked["messages"]))
    try:
        return orjson.dumps({"value": function(attempt, **arguments)}, option=orjson.OPT_SERIALIZE_NUMPY)
    except Exception as error:  # the boundary to the verifier: raising is data
        where = traceback.format_exception_only(error)[-1].strip()
        return orjson.dumps({"error": f"{where} (in {_place(error)})"})


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


if __name__ == "__main__":
    main(sys.argv)
