"""How a command of ours ends when something is wrong: the errors that users can mend, without a traceback.

Around the main function of `rlagent` and of every module that is run by `python -m`.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from rlagent.errors import RlagentError, Terminated, leaves


@contextmanager
def plain_errors() -> Iterator[None]:
    """Exit code 1 with a line for each RlagentError; 143, as after the signal, for a run that was asked to end."""
    try:
        yield
    except* Terminated as group:
        print(*leaves(group), sep="\n", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except* RlagentError as group:
        for error in leaves(group):
            Console(stderr=True).print(f"[bold red]error[/] {type(error).__name__}: ", end="")
            print(error, file=sys.stderr)
        sys.exit(1)
