"""One push: begin, buckets, end, version, verify. Runs in the learner's rank 0, while the router has the engines paused.

Invariant: an engine says version n only once all of n is in it; whatever fails raises WeightSyncError, and the caller gives the publish
up, which brings the engines back to the newest snapshot.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from rlagent.errors import WeightSyncError
from rlagent.fp8 import Fp8Blocks, stored
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.model.architecture import read_config
from rlagent.trainer.push_report import PushReport
from rlagent.trainer.weight_sync.buckets import make_buckets
from rlagent.trainer.weight_sync.checksums import Expected
from rlagent.trainer.weight_sync.distributed import DistributedTransport
from rlagent.trainer.weight_sync.engine_api import EngineApi, EngineSet, refuse_other_quantization
from rlagent.trainer.weight_sync.transports import DeltaTransport, DiskTransport, TensorTransport, Transport


class WeightSync:
    """Pushes weights to engines by the transport of its config; keeps connections and groups between pushes."""

    def __init__(self, config: SyncConfig, *, engine_dtype: torch.dtype, model_dir: Path | None = None) -> None:
        """model_dir: where the disk transport takes config and tokenizer from; its config says whether weights are float8 blocks."""
        self._config = config
        self._fp8 = None if model_dir is None else Fp8Blocks.of(read_config(model_dir))
        self._dtype = engine_dtype
        self._engines: EngineSet | None = None
        self._num_pushes = 0
        kinds: dict[str, Callable[[], Transport]] = {
            "tensor": TensorTransport,
            "distributed": DistributedTransport,
            "disk": lambda: DiskTransport(model_dir),
            "delta": lambda: DeltaTransport(model_dir),
        }
        self._transport = kinds[config.transport]()

    def push(
        self, engines: Sequence[str], weights: Iterable[tuple[str, torch.Tensor]], *, version: int, until: float = math.inf
    ) -> PushReport:  # fmt: skip
        """Make every engine (base URLs) hold `weights` (full tensors by Hugging Face name) as `version`.

        until: of time.monotonic(), when the publish's lease ends; a push that was held up (a stopped process, a slow gather) sends
        nothing more then, because the engines may serve again. WeightSyncError then, and when an engine does not hold the weights:
        its update may then be open, and it serves again after /update_weights_from_disk or another push.
        """
        self._num_pushes += 1
        try:
            connected = self._connect(engines)
            connected.until(until)
            return self._push(connected, weights, version)
        except BaseException:
            self._transport.abandon()
            raise

    def _push(self, engines: EngineSet, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> PushReport:
        verify = self._config.verify_every > 0 and self._num_pushes % self._config.verify_every == 0
        expected = Expected(engine.facts for engine in engines.engines) if verify else None
        seconds = {"gather": 0.0, "send": 0.0}
        num_bytes = num_buckets = 0
        for engine in engines.engines:
            refuse_other_quantization(engine, float8=self._fp8 is not None)
        if not self._transport.by_disk:
            engines.each(_begin)
        clock = time.perf_counter()
        for bucket in make_buckets(stored(self._fp8, weights, self._dtype), self._config.bucket_bytes):
            if expected is not None:
                for slot in bucket.slots:
                    expected.add(slot.name, bucket.tensor(slot))
            seconds["gather"] += -clock + (clock := time.perf_counter())
            self._transport.send(engines, bucket)
            seconds["send"] += -clock + (clock := time.perf_counter())
            num_bytes, num_buckets = num_bytes + bucket.flat.nbytes, num_buckets + 1
        sent_bytes = self._transport.finish(engines, version)
        if not self._transport.by_disk:
            engines.post("/end_weight_update", {})
        engines.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        seconds["end"] = -clock + (clock := time.perf_counter())
        verified = "not this time" if expected is None else self._verify(engines, expected)
        seconds["verify"] = time.perf_counter() - clock
        return PushReport(
            version=version, num_bytes=num_bytes, num_buckets=num_buckets,
            sent_bytes=num_bytes if sent_bytes is None else sent_bytes,
            checksum="" if expected is None else expected.digest, verified=verified, seconds=seconds,
        )  # fmt: skip

    def close(self) -> None:
        """Leave groups, close connections."""
        self._disconnect()
        self._transport.close()

    def _connect(self, urls: Sequence[str]) -> EngineSet:
        if self._engines is None or self._engines.urls != tuple(urls):
            self._disconnect()
            self._engines = EngineSet(urls)
        return self._engines

    def _disconnect(self) -> None:
        if self._engines is not None:
            self._transport.disconnect(self._engines)
            self._engines.close()
            self._engines = None

    @staticmethod
    def _verify(engines: EngineSet, expected: Expected) -> str:
        """Compare what every engine holds with what was sent, tensor by tensor."""
        answers = [expected.compare(engine) for engine in engines.engines]
        return next((answer for answer in answers if answer != "yes"), "yes")


def _begin(engine: EngineApi) -> None:
    """Open an update. SGLang refuses while one is open that a failed push left: it is ended first; what it lacks comes now."""
    try:
        engine.post("/begin_weight_update", {"selector": "all"})
    except WeightSyncError as error:
        if "already open" not in str(error):
            raise
        engine.post("/end_weight_update", {})
        engine.post("/begin_weight_update", {"selector": "all"})
