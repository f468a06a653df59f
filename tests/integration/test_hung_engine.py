"""An engine whose process is stopped in mid-push: the learner waits no longer than its lease, and half an update never serves."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from router_harness import MODEL
from safetensors.torch import load_file

from rlagent.buffer.config import BufferConfig
from rlagent.client import RouterClient
from rlagent.engine.config import EngineConfig
from rlagent.errors import WeightSyncError
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync

pytestmark = pytest.mark.slow
WAIT_S = 120.0


def stopping(weights: dict[str, torch.Tensor], pid: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Half of the tensors, each moved; then the engine's process stops."""
    for index, (name, tensor) in enumerate(weights.items()):
        if index == len(weights) // 2:
            os.kill(pid, signal.SIGSTOP)
        yield name, tensor + 0.01


async def shown(admin: RouterClient, state: str) -> dict[str, object]:
    """The engine, once it is in a state."""
    async with asyncio.timeout(WAIT_S):
        while True:
            (engine,) = (await admin.policy())["engines"]
            if engine["state"] == state:
                return dict(engine)
            await asyncio.sleep(0.1)  # the state is asked for; there is no event to wait for


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
async def test_an_engine_that_hangs_in_mid_push_is_replaced(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlagent.router.engine_client.PAUSED_TIMEOUT_S", 1.0)
    monkeypatch.setattr("rlagent.router.engine_client.GENERATE_TIMEOUT_S", 1.0)
    monkeypatch.setattr("rlagent.router.engine_client.CONTROL_TIMEOUT_S", 1.0)
    weights = {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}
    sync = WeightSync(SyncConfig(transport=transport, bucket_bytes=300_000), engine_dtype=torch.float32)  # type: ignore[arg-type]
    async with (
        serving(
            model_dir=MODEL, router=RouterConfig(), sampling=SamplingConfig(max_tokens=4),
            engine=EngineConfig(max_total_tokens=4096, hang_timeout_s=15.0), buffer=BufferConfig(),
            buffer_path=tmp_path / "buffer.db",
        ) as url,
        RouterClient(url) as admin,
        httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as http,
    ):  # fmt: skip
        ticket = await admin.begin_publish(step=1, parent=0, lease_s=6.0)
        (engine,) = ticket.engines
        before = (await http.post(f"{engine}/weights_checker")).json()["checksums"]
        pid = (await http.get(f"{engine}/server_info")).json()["pid"]
        try:
            with pytest.raises(
                WeightSyncError, match=rf"engine {engine} did not answer /.* before the publish's lease ran out"
            ):
                await asyncio.to_thread(
                    sync.push, ticket.engines, stopping(weights, pid), version=ticket.version, until=ticket.until
                )
            await shown(admin, "starting")
            found = await shown(admin, "ready")  # another process, at the same address
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert (found["url"], found["version"]) == (engine, 0)
        assert (await http.get(f"{engine}/server_info")).json()["pid"] != pid
        assert (await http.post(f"{engine}/weights_checker")).json()["checksums"] == before
        ticket = await admin.begin_publish(step=1, parent=0)
        report = await asyncio.to_thread(sync.push, ticket.engines, weights.items(), version=ticket.version)
        await admin.commit_publish(ticket.publish_id, checksum=report.checksum, snapshot=None)
        assert (await shown(admin, "ready"))["version"] == ticket.version
        await asyncio.to_thread(sync.close)
