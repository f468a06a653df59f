"""The transports: how a bucket reaches the engines between begin and end. Each holds what it set up until `close`."""

import shutil
import socket
import tempfile
from collections.abc import Iterable
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
from rlagent.trainer.weight_sync.sglang_pickle import serialize_bucket

_GROUP_TIMEOUT: Final = timedelta(minutes=5)


class Transport(Protocol):
    """Sends buckets of one push: `send` each in order, then `finish`. `version` is what the engines shall say."""

    def send(self, engines: EngineSet, bucket: Bucket, version: str) -> None: ...
    def finish(self, engines: EngineSet, version: str) -> None: ...
    def close(self) -> None: ...


class TensorTransport:
    """Buckets in HTTP bodies: inline on a CPU, as CUDA IPC handles on a GPU that engine and learner share."""

    def send(self, engines: EngineSet, bucket: Bucket, version: str) -> None:
        """Every engine gets the same payload; `flat` is kept alive until all have answered."""
        body = {
            "serialized_named_tensors": [serialize_bucket(bucket.flat, bucket.slots)],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
        engines.post("/update_weights_from_tensor", body)
        if bucket.flat.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()

    def finish(self, engines: EngineSet, version: str) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


class DistributedTransport:
    """Broadcast over a process group of the learner's rank 0 and all engines: gloo on a CPU, NCCL on GPUs."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._members: tuple[str, ...] = ()
        self._rebuilds = 0

    def send(self, engines: EngineSet, bucket: Bucket, version: str) -> None:
        """One HTTP call announces the tensors; each is then broadcast in the same order."""
        group = self._join(engines, bucket.flat.is_cuda)
        body = {
            "names": [slot.name for slot in bucket.slots],
            "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
            "group_name": self._name,
            "flush_cache": False,
            "weight_version": version,
        }
        answers = [engines._threads.submit(e.post, "/update_weights_from_distributed", body) for e in engines.engines]
        try:
            for slot in bucket.slots:
                tensor = bucket.flat[slot.start_idx : slot.end_idx].view(slot.dtype).reshape(slot.shape)
                dist.broadcast(tensor, group=group, group_src=0)
        except RuntimeError as error:
            self._group = None
            raise WeightSyncError(f"the broadcast to engines {', '.join(engines.urls)} failed: {error}") from error
        for answer in answers:
            answer.result()

    def finish(self, engines: EngineSet, version: str) -> None:
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
        self._rebuilds += 1
        self._name, self._members = f"rlagent-weights-{self._rebuilds}", engines.urls
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        world_size = 1 + len(engines.urls)
        backend = "nccl" if is_cuda else "gloo"
        answers = []
        for index, engine in enumerate(engines.engines):
            body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1 + index, "world_size": world_size,
                    "group_name": self._name, "backend": backend}  # fmt: skip
            answers.append(engines._threads.submit(engine.post, "/init_weights_update_group", body))
        store = c10d.PrefixStore(self._name, TCPStore("127.0.0.1", port, world_size, is_master=True))
        group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend(backend),
            store,
            group_name=c10d.GroupName(self._name),
            timeout=_GROUP_TIMEOUT,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        for answer in answers:
            answer.result()
        found: dist.ProcessGroup = group
        self._group = found
        return found


class DiskTransport:
    """Safetensors in a directory that learner and engines both see, then /update_weights_from_disk."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._files = tuple(files)
        self._directory = Path(tempfile.mkdtemp(prefix="rlagent-weights-"))
        self._tensors: dict[str, torch.Tensor] = {}

    def send(self, engines: EngineSet, bucket: Bucket, version: str) -> None:
        """Hold the tensors until all are there."""
        del engines, version  # both matter when the file is complete
        for slot in bucket.slots:
            tensor = bucket.flat[slot.start_idx : slot.end_idx].view(slot.dtype).reshape(slot.shape)
            self._tensors[slot.name] = tensor.cpu()

    def finish(self, engines: EngineSet, version: str) -> None:
        """Write one file and have every engine load it."""
        save_file(self._tensors, self._directory / "model.safetensors", metadata={"format": "pt"})
        self._tensors = {}
        for file in self._files:
            shutil.copy(file, self._directory)
        body: dict[str, Any] = {"model_path": str(self._directory), "weight_version": version, "flush_cache": False}
        engines.post("/update_weights_from_disk", body)

    def close(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)
