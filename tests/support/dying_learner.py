"""A learner's process that stops in mid-push and waits to be killed: dying_learner.py TRANSPORT MODEL_DIR

It prints "ready", reads "VERSION ENGINE_URL..." and prints "half" once half of the model's tensors were taken by the push.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync

BUCKET_BYTES = 300_000


def main(transport: str, model: Path) -> None:
    """Push half of a model's tensors."""
    weights = load_file(model / "model.safetensors")

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(weights.items()):
            if index == len(weights) // 2:
                print("half", flush=True)
                signal.pause()
            yield item

    config = SyncConfig(transport=transport, bucket_bytes=BUCKET_BYTES)  # type: ignore[arg-type]
    sync = WeightSync(config, engine_dtype=torch.float32, model_dir=model)
    print("ready", flush=True)
    version, *engines = sys.stdin.readline().split()
    sync.push(engines, half(), version=int(version))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
