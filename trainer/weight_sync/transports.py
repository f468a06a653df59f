"""The transports: how a bucket reaches the engines between begin and end. The broadcast is in distributed.py."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import save_file

from rlagent.trainer.weight_sync.buckets import Bucket
from rlagent.trainer.weight_sync.engine_api import EngineSet
from rlagent.trainer.weight_sync.sglang_pickle import serialize_bucket
from rlagent.trainer.weights import copy_model_files

_INDEX: Final = "model.safetensors.index.json"


class Transport(Protocol):
    """Sends buckets of one push: `send` each in order, then `finish`. The version is stamped by the push, at its end."""

    def send(self, engines: EngineSet, bucket: Bucket) -> None: ...
    def finish(self, engines: EngineSet) -> None: ...
    def abandon(self) -> None: ...  # the push failed: what it left half done must hold nobody up
    def disconnect(self, engines: EngineSet) -> None: ...  # these are pushed to no more; some may be gone
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

    def finish(self, engines: EngineSet) -> None:
        """Write the index and have every engine load the directory."""
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
