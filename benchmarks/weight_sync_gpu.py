"""The tensor transport on one GPU: a learner's process and an embedded engine's, memory shared by CUDA IPC handles.

python benchmarks/weight_sync_gpu.py [--sizes 1 4 8] [--bucket-mib 128 512 2048]
Random Qwen3 models of so many billion parameters in bfloat16. `copy`: tensors laid into buckets on the GPU, alone; `host`: handles made
and pickled, alone; `pause`: a whole push, from begin to the version, for which the engine stands still. `of ceiling` compares the copy
with one device-to-device copy of as many bytes. Without a GPU it says so and measures nothing.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
from machine import machine
from weight_sync import SHAPES, Weights, make_model, running

from rlagent.engine.config import EngineConfig
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync
from rlagent.trainer.weight_sync.buckets import make_buckets
from rlagent.trainer.weight_sync.sglang_pickle import pickle_bucket

# Hidden size, layers, vocabulary, by billions of parameters.
BILLIONS = {1: (2048, 19, 64000), 4: (2560, 51, 128000), 8: (4096, 38, 128000)}
CEILING_BYTES = 2**30
REPEATS = 5


def seconds(work: object) -> float:
    """Of a call on the GPU, the best of some."""
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()  # type: ignore[operator]
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


def ceiling() -> float:
    """Bytes a second of a copy within the GPU's memory."""
    source = torch.empty(CEILING_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return CEILING_BYTES / seconds(lambda: target.copy_(source))


def measure(url: str, weights: Weights, bucket_bytes: int) -> tuple[float, float, float]:
    """Seconds of copy, host and pause."""

    def copy() -> None:
        for _ in make_buckets(weights.items(), bucket_bytes):
            pass

    bucket = next(make_buckets(weights.items(), bucket_bytes))
    num_buckets = -(-sum(tensor.nbytes for tensor in weights.values()) // bucket_bytes)
    host_s = num_buckets * seconds(lambda: pickle_bucket(bucket.flat, bucket.slots))
    config = SyncConfig(transport="tensor", bucket_bytes=bucket_bytes, verify_every=0)
    sync = WeightSync(config, engine_dtype=torch.bfloat16)
    httpx.post(url + "/pause_generation", json={"mode": "abort"}, timeout=60, trust_env=False).raise_for_status()
    sync.push([url], weights.items(), version=1)  # connects
    pause_s = seconds(lambda: sync.push([url], weights.items(), version=2))
    sync.close()
    httpx.post(url + "/continue_generation", json={}, timeout=60, trust_env=False).raise_for_status()
    return seconds(copy), host_s, pause_s


def main() -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8], choices=list(BILLIONS))
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[128, 512, 2048])
    args = parser.parse_args()
    print(machine())
    if not torch.cuda.is_available():
        print("not run: there is no GPU here")
        return 0
    limit = ceiling()
    print(f"{torch.cuda.get_device_name()}: a device-to-device copy makes {limit / 1e9:.0f} GB/s\n")
    print("| B parameters | bucket MiB | copy ms | of ceiling | host ms | pause ms |\n" + "|---" * 6 + "|")
    engine = EngineConfig(device="cuda", dtype="bfloat16", max_running=2, max_total_tokens=2048)
    for billions in args.sizes:
        SHAPES[1000 * billions] = BILLIONS[billions]
        with tempfile.TemporaryDirectory() as root:
            model = Path(root) / "model"
            weights = {name: tensor.cuda() for name, tensor in make_model(1000 * billions, model).items()}
            size = sum(tensor.nbytes for tensor in weights.values())
            with running(engine, model) as url:
                for mib in args.bucket_mib:
                    copy_s, host_s, pause_s = measure(url, weights, mib * 2**20)
                    ms = (copy_s * 1e3, host_s * 1e3, pause_s * 1e3)
                    share = size / copy_s / limit
                    row = (
                        f"{size / 2e9:.2f}",
                        str(mib),
                        f"{ms[0]:.1f}",
                        f"{share:.2f}",
                        f"{ms[1]:.1f}",
                        f"{ms[2]:.1f}",
                    )
                    print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
