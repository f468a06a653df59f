"""`rlagent serve --engine sglang` as a process, and publishes to it as the driver makes them."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from sglang_process import START_S, sglang_python

from rlagent.client import RouterClient
from rlagent.errors import WeightSyncError
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync


@dataclass(frozen=True)
class Serve:
    """The router's base URL, its process, and the model that it serves."""

    url: str
    process: subprocess.Popen[str]
    model: Path
    engine_log: Path

    def engine_pid(self) -> int:
        """The SGLang server, the child of serve."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(pid) for pid in children if b"sglang_server.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid


@contextmanager
def running_serve(model: Path, root: Path, *engine_args: str, settings: tuple[str, ...] = ()) -> Iterator[Serve]:
    """The router with one SGLang server on the CPU; its files are in `root`, and it ends by SIGTERM with status 0."""
    command = [sys.executable, "-m", "rlagent.cli", "serve", "--model", str(model), "--engine", "sglang", "--port", "0"]
    command += ["--buffer", str(root / "buffer.db"), *(f"--engine-arg={argument}" for argument in engine_args)]
    settings = (
        f"engine.sglang.python={sglang_python()}", "engine.device=cpu", "engine.max_running=8", "engine.max_total_tokens=16384",
        f"engine.start_timeout_s={START_S}", *settings,
    )  # fmt: skip
    command += [part for setting in settings for part in ("--set", setting)]
    with (
        (root / "serve.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"serve ended: {(root / 'serve.log').read_text()[-3000:]}"
        yield Serve(line.split()[-1], process, model, root / "logs" / "engine-0.log")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


async def ready(admin: RouterClient) -> dict[str, Any]:
    """The engine, once it takes calls."""
    deadline = time.monotonic() + START_S
    while True:
        (engine,) = (await admin.policy())["engines"]
        if engine["state"] == "ready":
            return dict(engine)
        assert time.monotonic() < deadline, engine
        await asyncio.sleep(0.2)  # the state is asked for; there is no event to wait for


async def checksums(url: str) -> list[dict[str, str]]:
    """By name, of each tensor-parallel rank."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        ranks = (await http.post("/weights_checker", json={"action": "checksum"})).json()["ranks"]
    return [rank["checksums"] for rank in sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])]


def pusher(transport: str, model: Path) -> WeightSync:
    """What pushes by a transport in several buckets."""
    config = SyncConfig(transport=transport, bucket_bytes=300_000)  # type: ignore[arg-type]
    return WeightSync(config, engine_dtype=torch.float32, model_dir=model)


async def publish(admin: RouterClient, weights: Any, serve: Serve, transport: str = "tensor") -> int:
    """A whole publish as the driver makes it; a failed push gives it up and raises."""
    current = (await admin.policy())["version"]
    ticket = await admin.begin_publish(step=current + 1, parent=current)
    sync = pusher(transport, serve.model)
    try:
        report = await asyncio.to_thread(sync.push, ticket.engines, weights, version=ticket.version)
    except WeightSyncError as error:
        await admin.fail_publish(ticket.publish_id, str(error))
        raise
    finally:
        sync.close()
    assert report.verified == "yes"
    await admin.commit_publish(ticket.publish_id, checksum=report.checksum, snapshot=None)
    return ticket.version
