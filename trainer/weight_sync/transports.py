"""The transports: how a bucket reaches the engines between begin and end. The broadcast is in distributed.py."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import save_file

from rlagent.errors import WeightSyncError
from rlagent.trainer.weight_sync.buckets import Bucket
from rlagent.trainer.weight_sync.cuda_ipc import explain, refuse_expandable_segments
from rlagent.trainer.weight_sync.engine_api import EngineApi, EngineSet, refuse_replicas
from rlagent.trainer.weight_sync.sglang_pickle import pickle_bucket, update_body
from rlagent.trainer.weight_sync.shadow import Chain, Shadow
from rlagent.trainer.weights import copy_model_files

_INDEX: Final = "model.safetensors.index.json"


class Transport(Protocol):
    """Sends buckets of one push: `send` each in order, then `finish`. The version is stamped by the push, at its end.

    by_disk: engines load a directory, which needs no session of an update. finish answers the bytes that travelled where they are
    not those of the buckets.
    """

    by_disk: bool

    def send(self, engines: EngineSet, bucket: Bucket) -> None: ...
    def finish(self, engines: EngineSet, version: int) -> int | None: ...
    def abandon(self) -> None: ...  # the push failed: what it left half done must hold nobody up
    def disconnect(self, engines: EngineSet) -> None: ...  # these are pushed to no more; some may be gone
    def close(self) -> None: ...


class TensorTransport:
    """Buckets in HTTP bodies: inline on a CPU, as CUDA IPC handles on a GPU that engine and learner share."""

    by_disk = False

    def send(self, engines: EngineSet, bucket: Bucket) -> None:
        """Every engine gets the same payload, once for each of its ranks; `flat` is kept alive until all have answered."""
        if bucket.flat.is_cuda:
            refuse_expandable_segments(os.environ)
        pickled = pickle_bucket(bucket.flat, bucket.slots)

        def send_one(engine: EngineApi) -> None:
            if bucket.flat.is_cuda and engine.facts.tensor > 1:
                raise WeightSyncError(
                    f"engine {engine.url} has {engine.facts.tensor} tensor-parallel ranks on GPUs of their own, which the learner's "
                    "memory handle does not reach; set sync.transport = 'distributed'"
                )
            refuse_replicas(engine)
            try:
                engine.post_pieces("/update_weights_from_tensor", *update_body(pickled, engine.facts.tensor))
            except WeightSyncError as error:
                raise explain(error) from error

        engines.each(send_one)
        if bucket.flat.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()

    def finish(self, engines: EngineSet, version: int) -> None:
        """Nothing is left to do."""

    def abandon(self) -> None:
        """Every bucket stands for itself."""

    def disconnect(self, engines: EngineSet) -> None:
        """Nothing was set up."""

    def close(self) -> None:
        """Nothing is held."""


class DiskTransport:
    """A model directory that learner and engines both see, then /update_weights_from_disk.

    Each bucket is a shard. Config and tokenizer come from the model's own directory; SGLang asks for them.
    """

    by_disk = True

    def __init__(self, model_dir: Path | None) -> None:
        self._model_dir = model_dir
        self._directory = Path(tempfile.mkdtemp(prefix="rlagent-weights-"))
        self._weight_map: dict[str, str] = {}
        self._num_shards = 0

    def send(self, engines: EngineSet, bucket: Bucket) -> None:
        """Write a shard."""
        del engines  # they matter once the directory is complete
        self._num_shards += 1
        file = f"model-{self._num_shards:05d}.safetensors"
        tensors = {slot.name: bucket.tensor(slot).cpu() for slot in bucket.slots}
        save_file(tensors, self._directory / file, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(tensors, file)
        if self._num_shards == 1 and self._model_dir is not None:
            copy_model_files(self._model_dir, self._directory, next(iter(tensors.values())).dtype)

    def finish(self, engines: EngineSet, version: int) -> None:
        """Write the index and have every engine load the directory."""
        del version  # the push stamps it
        total = sum((self._directory / file).stat().st_size for file in set(self._weight_map.values()))
        index = {"metadata": {"total_size": total}, "weight_map": self._weight_map}
        (self._directory / _INDEX).write_text(json.dumps(index))
        body: dict[str, Any] = {"model_path": str(self._directory), "flush_cache": False}
        engines.post("/update_weights_from_disk", body)
        self.abandon()

    def abandon(self) -> None:
        """Empty the directory: a shorter push must not leave shards of a longer one."""
        for file in self._directory.iterdir():
            file.unlink()
        self._weight_map, self._num_shards = {}, 0

    def disconnect(self, engines: EngineSet) -> None:
        """Nothing was set up."""

    def close(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)


class DeltaTransport:
    """What changed since the last push, applied to a shadow copy beside the engines, which they load from disk."""

    by_disk = True

    def __init__(self, model_dir: Path | None) -> None:
        self._model_dir = model_dir
        self._root = Path(tempfile.mkdtemp(prefix="rlagent-delta-"))
        for name in ("chain", "shadow"):
            (self._root / name).mkdir()
        self._chain = Chain(self._root / "chain")
        self._shadow = Shadow(self._root / "shadow")
        self._new: dict[str, torch.Tensor] = {}

    def send(self, engines: EngineSet, bucket: Bucket) -> None:
        """Keep the bucket's tensors: what they changed is told at the end."""
        del engines
        self._new |= {slot.name: bucket.tensor(slot).cpu() for slot in bucket.slots}

    def finish(self, engines: EngineSet, version: int) -> int:
        """Write the link, apply it to the shadow copy, and have every engine load that. The bytes of the link."""
        new, self._new = self._new, {}
        if self._shadow.version is None and self._model_dir is not None:
            copy_model_files(self._model_dir, self._shadow.directory, next(iter(new.values())).dtype)
        path, delta = self._chain.add(version, new)
        self._shadow.take(path)
        engines.post("/update_weights_from_disk", {"model_path": str(self._shadow.directory), "flush_cache": False})
        return delta.num_bytes

    def abandon(self) -> None:
        """The next link is a full one, whatever the shadow copy holds."""
        self._new = {}
        self._chain.forget()

    def disconnect(self, engines: EngineSet) -> None:
        """Any engine can load the shadow copy."""

    def close(self) -> None:
        """Delete chain and shadow copy."""
        shutil.rmtree(self._root, ignore_errors=True)
