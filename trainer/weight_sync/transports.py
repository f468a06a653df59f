"""The transports: how a bucket reaches the engines between begin and end. Each holds what it set up until `close`."""

import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable
from concurrent.futures import Future, as_completed
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from rlagent.errors import WeightSyncError
from rlagent.trainer.weight_sync.buckets import Bucket
from rlagent.trainer.weight_sync.engine_api import EngineSet
from rlagent.trainer.weight_sync.sglang_pickle import TensorSlot, serialize_bucket

_GROUP_TIMEOUT: Final = timedelta(minutes=5)


class Transport(Protocol):
    """Sends buckets of one push: `send` each in order, then `finish`. The version is stamped by the push, at its end."""

    def send(self, engines: EngineSet, bucket: Bucket) -> None: ...
    def finish(self, engines: EngineSet) -> None: ...
    def close(self) -> None: ...


class TensorTransport:
    """Buckets in HTTP bodies: inline on a CPU, as CUDA IPC handles on a GPU that engine and learner share."""

    def send(self, engines: EngineSet, bucket: Bucket) -> None:
        """Every engine gets the same payload; `flat` is kept alive until all have answered."""
        body = {
            "serialized_named_tensors": [serialize_bucket(bucket.flat, bucket.slots)],
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        engines.post("/update_weights_from_tensor", body)
        if bucket.flat.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()

    def finish(self, engines: EngineSet) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


class DistributedTransport:
    """Broadcast over a process group of the learner's rank 0 and all engines: gloo on a CPU, NCCL on GPUs."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._members: tuple[str, ...] = ()

    def send(self, engines: EngineSet, bucket: Bucket) -> None:
        """One HTTP call announces the tensors; each is then broadcast in the same order."""
        group = self._join(engines, bucket.flat.is_cuda)
        body = {
            "names": [slot.name for slot in bucket.slots],
            "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
            "group_name": self._name,
            "flush_cache": False,
        }
        answers = [engines.submit(engine.post, "/update_weights_from_distributed", body) for engine in engines.engines]
        sending = [
            dist.broadcast(_tensor(bucket, slot), group=group, group_src=0, async_op=True) for slot in bucket.slots
        ]
        try:
            # An engine answers when it has all, or when it refuses: then nobody would take the broadcast.
            for answer in as_completed(answers):
                answer.result()
            for work in sending:
                work.wait()
        except (WeightSyncError, RuntimeError) as error:
            self._group = None
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"the broadcast to engines {', '.join(engines.urls)} failed: {error}") from error

    def finish(self, engines: EngineSet) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _join(self, engines: EngineSet, is_cuda: bool) -> dist.ProcessGroup:
        """The group of these engines; a new one when they changed."""
        if self._group is not None and self._members == engines.urls:
            return self._group
        self.close()
        self._name, self._members = f"rlagent-weights-{uuid.uuid4().hex}", engines.urls
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        world_size = 1 + len(engines.urls)
        backend = "nccl" if is_cuda else "gloo"
        joining: list[Future[Any]] = []
        for index, engine in enumerate(engines.engines):
            body = {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1 + index,
                "world_size": world_size,
                "group_name": self._name,
                "backend": backend,
            }
            joining.append(engines.submit(engine.post, "/init_weights_update_group", body))
        own = engines.submit(_make_group, self._name, port, world_size, backend)
        for done in as_completed([*joining, own]):
            try:
                done.result()  # an engine that refuses ends the wait for it
            except RuntimeError as error:
                raise WeightSyncError(f"no weight update group with {', '.join(engines.urls)}: {error}") from error
        self._group = own.result()
        return self._group


def _tensor(bucket: Bucket, slot: TensorSlot) -> torch.Tensor:
    return bucket.flat[slot.start_idx : slot.end_idx].view(slot.dtype).reshape(slot.shape)


def _make_group(name: str, port: int, world_size: int, backend: str) -> dist.ProcessGroup:
    """This process as rank 0 of a group beside torch.distributed's default one."""
    store = c10d.PrefixStore(name, TCPStore("127.0.0.1", port, world_size, is_master=True, wait_for_workers=False))
    group, _ = c10d._new_process_group_helper(
        world_size, 0, [], c10d.Backend(backend), store, group_name=c10d.GroupName(name), timeout=_GROUP_TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    found: dist.ProcessGroup = group
    return found


class DiskTransport:
    """Safetensors in a directory that learner and engines both see, then /update_weights_from_disk."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._files = tuple(files)
        self._directory = Path(tempfile.mkdtemp(prefix="rlagent-weights-"))
        self._tensors: dict[str, torch.Tensor] = {}

    def send(self, engines: EngineSet, bucket: Bucket) -> None:
        """Hold the tensors until all are there."""
        del engines  # they matter when the file is complete
        for slot in bucket.slots:
            self._tensors[slot.name] = _tensor(bucket, slot).cpu()

    def finish(self, engines: EngineSet) -> None:
        """Write one file and have every engine load it."""
        save_file(self._tensors, self._directory / "model.safetensors", metadata={"format": "pt"})
        self._tensors = {}
        for file in self._files:
            shutil.copy(file, self._directory)
        body: dict[str, Any] = {"model_path": str(self._directory), "flush_cache": False}
        engines.post("/update_weights_from_disk", body)

    def close(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)
