"""The processes of benchmarks/router.py: fake upstream, proxies and agents, each on the cores that it is given.

A proxy has one core to itself; upstream and agents share the others (or that one, where there is one only).
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

HERE = Path(__file__).parent
# LiteLLM imports for long.
START_S = 120.0
CONTEXT = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which cores a proxy and the rest run on. `realtime`: before all other work of the machine (needs root)."""

    proxy: frozenset[int]
    others: frozenset[int]
    realtime: bool

    @classmethod
    def split(cls, *, realtime: bool) -> "Cores":
        first, *rest = sorted(os.sched_getaffinity(0))
        return cls(proxy=frozenset({first}), others=frozenset(rest or [first]), realtime=realtime)

    def give(self, pid: int, cores: frozenset[int]) -> None:
        """To a process that has just begun; its threads to come inherit it."""
        os.sched_setaffinity(pid, cores)
        if self.realtime:
            os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(10))


@dataclass(frozen=True, slots=True)
class Server:
    """A listening process."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Processor seconds so far, of all its threads."""
        times = self.process.cpu_times()
        return times.user + times.system

    def rss_mib(self) -> float:
        """Resident memory."""
        return self.process.memory_info().rss / 2**20


@contextmanager
def running(command: Sequence[str | Path], cores: Cores, on: frozenset[int], **more: Any) -> Iterator[subprocess.Popen]:  # type: ignore[type-arg]
    """A child process, ended at the end."""
    with subprocess.Popen([str(part) for part in command], **more) as child:
        cores.give(child.pid, on)
        try:
            yield child
        finally:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(20)
            child.kill()


def _first_line(child: subprocess.Popen) -> str:  # type: ignore[type-arg]
    """What a server says when it answers. RuntimeError for one that ended instead."""
    line: str = child.stdout.readline().strip() if child.stdout else ""
    if not line:
        raise RuntimeError(f"{child.args!r} did not start (exit code {child.wait()}); its error stands above")
    return line


@contextmanager
def upstream(model: Path, cores: Cores, delay_ms: float) -> Iterator[str]:
    """The fake engine's URL."""
    command = [sys.executable, HERE / "fake_upstream.py", model, "--delay-ms", str(delay_ms)]
    with running(command, cores, cores.others, stdout=subprocess.PIPE, text=True) as child:
        yield _first_line(child)


@contextmanager
def rlagent(model: Path, engine: str, directory: Path, cores: Cores) -> Iterator[Server]:
    """`rlagent serve` before the fake engine, recording into a file of its own."""
    command = [
        sys.executable, "-m", "rlagent.cli", "serve", "--model", model, "--port", "0", "--engine-url", engine,
        "--buffer", directory / "buffer.db",
    ]  # fmt: skip
    with running(command, cores, cores.proxy, stdout=subprocess.PIPE, text=True) as child:
        yield Server(_first_line(child).split()[-1], psutil.Process(child.pid))


@contextmanager
def litellm(python: Path, engine: str, directory: Path, cores: Cores) -> Iterator[Server]:
    """The LiteLLM proxy before the same engine: one worker, no database, nothing recorded."""
    entry = {"model": "openai/policy", "api_base": f"{engine}/v1", "api_key": "none"}
    config = directory / "litellm.yaml"  # JSON is YAML
    config.write_bytes(orjson.dumps({"model_list": [{"model_name": "policy", "litellm_params": entry}]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python.with_name("litellm"), "--config", config, "--host", "127.0.0.1", "--port", str(port),
        "--num_workers", "1", "--telemetry", "False",
    ]  # fmt: skip
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    environ.pop("PYTHONPATH", None)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with running(command, cores, cores.proxy, env=environ, cwd=directory, **quiet) as child:
        url = f"http://127.0.0.1:{port}"
        _await_health(f"{url}/health/liveliness", child)
        yield Server(url, psutil.Process(child.pid))


def _await_health(url: str, child: subprocess.Popen) -> None:  # type: ignore[type-arg]
    end = time.monotonic() + START_S
    while time.monotonic() < end and child.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"{url} does not answer; is the environment complete?")


class Agents:
    """benchmarks/load.py against one URL."""

    def __init__(self, child: subprocess.Popen) -> None:  # type: ignore[type-arg]
        if child.stdin is None or child.stdout is None:
            raise ValueError("the agents' process needs pipes: start it with stdin=PIPE, stdout=PIPE")
        self._asks, self._answers = child.stdin, child.stdout

    def do(self, what: str, **more: Any) -> Any:
        """Give one command and wait for its answer."""
        self._asks.write(orjson.dumps({"do": what, **more}) + b"\n")
        self._asks.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError("the agents broke off; their error stands above")
        return orjson.loads(line)


@contextmanager
def agents(url: str, model: Path, cores: Cores, *, stream: bool = False) -> Iterator[Agents]:
    """A load generator in a process of its own."""
    command = [sys.executable, HERE / "load.py", url, model, *(["--stream"] if stream else [])]
    with running(command, cores, cores.others, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield Agents(child)


def model_with_long_context(directory: Path) -> Path:
    """The demo's tokenizer and template, under a config that allows long conversations."""
    source = HERE.parent / "examples" / "parcels" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((source / name).read_bytes())
    config = orjson.loads((source / "config.json").read_bytes()) | {"max_position_embeddings": CONTEXT}
    (directory / "config.json").write_bytes(orjson.dumps(config))
    return directory
