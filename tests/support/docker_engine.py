"""A Docker engine of the tests' own, with an image made of one static program: nothing is downloaded."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

PROGRAMS = "cat chmod cp echo env find grep head id kill ln ls mkdir mknod mount mv nc ps rm setsid sh sleep stat tail test touch true wc"
_START_S = 60
_REQUIRED = "RLAGENT_REQUIRE_DOCKER"


def missing(*programs: str) -> str | None:
    """Why the tests must be skipped, or None. With _REQUIRED set they fail instead."""
    lacking = [name for name in programs if shutil.which(name) is None]
    reason = f"not installed: {', '.join(lacking)}" if lacking else "an engine needs root" if os.geteuid() else None
    if reason is not None and os.environ.get(_REQUIRED):
        pytest.fail(f"{_REQUIRED} is set: {reason}")
    return reason


def _leave_out(what: str, log: str) -> NoReturn:
    """An engine that is installed and cannot run, as in a container without rights: said, with its last words."""
    if os.environ.get(_REQUIRED):
        pytest.fail(f"{_REQUIRED} is set: {what}: {log}")
    pytest.skip(f"{what}: {log.strip().rpartition(chr(10))[2]}")


@contextmanager
def running_engine() -> Iterator[Path]:
    """Its socket. Everything of it is in a temporary directory and ends with it."""
    directory = Path(tempfile.mkdtemp(prefix="dk"))  # short: the engine's socket paths are bounded
    gvisor = directory / "runsc"
    gvisor.write_text('#!/bin/sh\nexec runsc --platform=ptrace --network=none "$@"\n')
    gvisor.chmod(0o755)
    engine = directory / "s.sock"
    command = ["dockerd", "--data-root", directory / "data", "--exec-root", directory / "exec", "--pidfile", directory / "pid",
               "--host", f"unix://{engine}", "--bridge", "none", "--iptables=false", "--add-runtime", f"runsc={gvisor}"]  # fmt: skip
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _START_S
        while b"API listen" not in (directory / "log").read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                _leave_out("dockerd does not start here", (directory / "log").read_text())
            time.sleep(0.05)
        yield engine
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def make_root(directory: Path) -> Path:
    """A root filesystem of a static busybox."""
    for name in ("bin", "tmp", "work", "etc", "proc", "sys", "dev"):
        (directory / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", directory / "bin" / "busybox")
    for name in PROGRAMS.split():
        (directory / "bin" / name).symlink_to("busybox")
    return directory
