"""A real embedded engine as a child process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_engine(model_dir: Path, *options: str) -> Iterator[str]:
    """`python -m rlagent.engine` on a free port; yields its base URL, and ends it by its process id."""
    command = [
        sys.executable,
        "-m",
        "rlagent.engine",
        "--model",
        str(model_dir),
        "--port",
        "0",
        "--weight-version",
        "0",
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()
            process.wait()
