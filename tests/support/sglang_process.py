"""A real SGLang server as a child process, started by the very command that serve uses."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest

from rlagent.engine.config import EngineConfig, SglangConfig
from rlagent.launch.engine_command import engine_command
from rlagent.launch.local import free_port
from rlagent.types import PolicyVersion

START_S = 600.0
CONFIG = EngineConfig(kind="sglang", device="cpu", max_running=8, max_total_tokens=16384)


def sglang_python() -> Path:
    """The Python that has sglang, as the environment names it; without one the test is skipped, or fails where it is required."""
    named = os.environ.get("RLAGENT_SGLANG_PYTHON")
    if named is not None:
        return Path(named)
    if os.environ.get("RLAGENT_REQUIRE_SGLANG") == "1":
        pytest.fail("RLAGENT_REQUIRE_SGLANG=1, and RLAGENT_SGLANG_PYTHON is not set; run make test-sglang")
    pytest.skip("RLAGENT_SGLANG_PYTHON is not set; make test-sglang sets it")


@contextmanager
def running_sglang(
    model_dir: Path, *args: str, tensor: int = 1, device: Literal["cpu", "cuda"] = "cpu"
) -> Iterator[str]:
    """A server with the weights of a directory as version 0; yields its base URL, and ends it by its process id."""
    sglang = SglangConfig(python=sglang_python(), args=args, tensor=tensor)
    config = CONFIG.model_copy(update={"sglang": sglang, "device": device})
    weights = PolicyVersion(version=0, parent=None, depth=0, step=0, published_at=0.0, snapshot=str(model_dir))
    port = free_port()
    command = engine_command(config, weights, number=0, port=port)
    url = f"http://127.0.0.1:{port}"
    # A paused server answers /health_generate after this time, by default 20 s.
    environ = {**os.environ, **command.environ, "SGLANG_HEALTH_CHECK_TIMEOUT": "3"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command.argv, stdout=log, stderr=log, env=environ, start_new_session=True) as process,
    ):
        try:
            deadline = time.monotonic() + START_S
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    pytest.fail(f"SGLang did not start (status {process.poll()}):\n{log.read()[-4000:]}")
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health_generate", timeout=30, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
