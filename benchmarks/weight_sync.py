"""Weights from a learner into an engine on the CPU, by every transport: seconds and GB/s of a whole push, against memcpy in the same run.

python benchmarks/weight_sync.py [--sizes 50 500] [--sglang-python PYTHON]
Random Qwen3 models in bfloat16. A push is begin, buckets, end and version; checksums are compared in one more push, not timed.
`processor s` is what learner and engine together used: on a machine that is busy with other work it says more than the clock.
"delta 1%" changes one element of a hundred between pushes; "delta all" changes every one, so that it is dense.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import torch
from machine import machine
from safetensors.torch import save_file

from rlagent.engine.config import EngineConfig, SglangConfig
from rlagent.launch.engine_command import engine_command
from rlagent.launch.local import free_port
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.model.architecture import read_architecture
from rlagent.trainer.weight_map import rules, shapes
from rlagent.trainer.weight_sync import WeightSync
from rlagent.types import PolicyVersion

Weights = dict[str, torch.Tensor]
SHAPES = {50: (512, 10, 32000), 500: (1280, 22, 64000)}  # hidden size, layers, vocabulary
BUCKET_BYTES = 64 * 1024 * 1024


def make_model(millions: int, directory: Path) -> Weights:
    """A model directory of about so many million parameters, and its tensors."""
    hidden, layers, vocabulary = SHAPES[millions]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64,
        "vocab_size": vocabulary, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "dtype": "bfloat16",
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(directory)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        for rule in rules(architecture)
        for name, shape in zip(rule.hf, shapes(architecture, rule), strict=True)
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return weights


@contextmanager
def running(config: EngineConfig, model: Path) -> Iterator[str]:
    """An engine on a free port; yields its base URL."""
    port = free_port()
    weights = PolicyVersion(version=0, parent=None, depth=0, step=0, published_at=0.0, snapshot=str(model))
    command = engine_command(config, weights, number=0, port=port)
    url = f"http://127.0.0.1:{port}"
    log = model / "engine.log"
    with log.open("w") as output, subprocess.Popen(
        command.argv, stdout=output, stderr=output, env={**os.environ, **command.environ}, start_new_session=True
    ) as process:  # fmt: skip
        try:
            while not answers(url):
                if process.poll() is not None:
                    raise SystemExit(f"the engine did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    """Whether it generates."""
    try:
        return httpx.get(url + "/health_generate", timeout=60, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def memcpy_s(weights: Weights) -> float:
    """Seconds to copy all weights once within memory, the best of three."""
    flat = torch.cat([tensor.flatten() for tensor in weights.values()])
    target = torch.empty_like(flat)
    return min(timed(lambda: target.copy_(flat)) for _ in range(3))


def timed(work: object) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start


def change(weights: Weights, share: float) -> None:
    """Change a share of the elements of every tensor."""
    step = round(1 / share)
    for tensor in weights.values():
        tensor.view(-1)[::step].mul_(-1.0)


def processor_s() -> float:
    """Seconds of the processor so far, of this process and of the engine, its only child with its own."""
    engine = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in engine)


def measure(
    url: str, weights: Weights, model: Path, transport: str, share: float, pushes: int
) -> tuple[float, float, int]:
    """Mean seconds of a push, by the clock and of the processor, and the bytes that travelled for the last one."""
    config = SyncConfig(transport=transport, bucket_bytes=BUCKET_BYTES, verify_every=pushes + 2)  # type: ignore[arg-type]
    sync = WeightSync(config, engine_dtype=torch.bfloat16, model_dir=model)
    httpx.post(url + "/pause_generation", json={"mode": "abort"}, timeout=60, trust_env=False).raise_for_status()
    seconds, used, sent = 0.0, 0.0, 0
    for version in range(1, pushes + 3):
        change(weights, share)
        start, before = time.perf_counter(), processor_s()
        report = sync.push([url], weights.items(), version=version)
        if 1 < version < pushes + 2:  # not the first, which connects, and not the last, which compares checksums
            seconds, sent = seconds + time.perf_counter() - start, report.sent_bytes
            used += processor_s() - before
    assert report.verified == "yes", report.verified
    sync.close()
    httpx.post(url + "/continue_generation", json={}, timeout=60, trust_env=False).raise_for_status()
    return seconds / pushes, used / pushes, sent


def main() -> int:
    """Print one table for all sizes, engines and transports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 500], choices=list(SHAPES))
    parser.add_argument("--sglang-python", type=Path, help="measure a real SGLang server too, by this Python")
    parser.add_argument("--pushes", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    limits = {"device": "cpu", "dtype": "bfloat16", "max_running": 2, "max_total_tokens": 2048}
    engines = {"embedded": EngineConfig(**limits)}
    if args.sglang_python is not None:
        sglang = SglangConfig(python=args.sglang_python, args=("--skip-tokenizer-init",))
        engines["sglang"] = EngineConfig(kind="sglang", sglang=sglang, **limits)
    lines = ["| engine | M parameters | transport | s | GB/s | of memcpy | processor s | MB sent |", "|" + "---|" * 8]
    where = machine()
    with tempfile.TemporaryDirectory() as root:
        for millions in args.sizes:
            model = Path(root) / str(millions)
            weights = make_model(millions, model)
            size = sum(tensor.nbytes for tensor in weights.values())
            copy_s = memcpy_s(weights)
            lines.append(f"| (memcpy) | {size / 2e6:.0f} | | {copy_s:.3f} | {size / copy_s / 1e9:.2f} | 1 | | |")
            for kind, config in engines.items():
                with running(config, model) as url:
                    for name, transport, share in (
                        ("tensor", "tensor", 1.0), ("distributed", "distributed", 1.0), ("disk", "disk", 1.0),
                        ("delta all", "delta", 1.0), ("delta 1%", "delta", 0.01),
                    ):  # fmt: skip
                        seconds, used, sent = measure(url, weights, model, transport, share, args.pushes)
                        speed = size / seconds / 1e9
                        lines.append(
                            f"| {kind} | {size / 2e6:.0f} | {name} | {seconds:.3f} | {speed:.2f} | {copy_s / seconds:.3f} | "
                            f"{used:.2f} | {sent / 1e6:.0f} |"
                        )
                        print(lines[-1], file=sys.stderr, flush=True)
    print(where, "", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
