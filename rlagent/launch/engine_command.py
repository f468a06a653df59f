"""How an engine's process is started: its command line and what it adds to the environment. Pure.

In the flow: `rlagent.launch.engines` runs the command and looks after the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from rlagent.engine.config import EngineConfig, SglangConfig
from rlagent.errors import ConfigError
from rlagent.types import PolicyVersion

_SGLANG_SERVER: Final = Path(__file__).with_name("sglang_server.py")
_CUDA_DEVICES: Final = Path("/dev/nvidiactl")
_TENSOR_FLAGS: Final = ("--tp-size", "--tensor-parallel-size", "--tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """A process to start."""

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


def engine_command(config: EngineConfig, weights: PolicyVersion, *, number: int, port: int) -> EngineCommand:
    """The command of engine `number` on `port` that starts with `weights`. ConfigError where a setting is missing."""
    assert weights.snapshot is not None
    threads = str(config.threads)
    environ = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if config.kind == "sglang":
        return _sglang(config, weights.snapshot, weights.version, number, port, environ)
    flags = {
        "--model": weights.snapshot,
        "--host": "127.0.0.1",
        "--port": port,
        "--weight-version": weights.version,
        "--device": config.device,
        "--dtype": config.dtype,
        "--threads": config.threads,
        "--max-running": config.max_running,
        "--max-total-tokens": config.max_total_tokens,
        "--prefill-tokens": config.prefill_tokens,
        "--seed": config.seed + number,
        "--parent-pid": os.getpid(),
    }
    return EngineCommand(argv=(sys.executable, "-m", "rlagent.engine", *_words(flags)), environ=environ)


def _sglang(
    config: EngineConfig, model: str, version: int, number: int, port: int, environ: dict[str, str]
) -> EngineCommand:
    sglang = config.sglang
    if sglang.python is None:
        raise ConfigError(
            "engine.kind = 'sglang' needs engine.sglang.python: the Python of an environment that has sglang installed, "
            "e.g. /opt/sglang/bin/python (tests/sglang/make_venv.sh makes one for the CPU)"
        )
    if not sglang.python.is_file():
        raise ConfigError(f"engine.sglang.python = {str(sglang.python)!r} is not a file; name a Python that has sglang")
    tensor = _tensor_ranks(sglang)
    flags: dict[str, object] = {
        "--model-path": model,
        "--host": "127.0.0.1",
        "--port": port,
        "--weight-version": version,
        "--dtype": config.dtype,
        "--tp-size": tensor,
        "--random-seed": config.seed + number,
    }
    bare: tuple[str, ...] = ()
    if on_cpu(config):
        environ["SGLANG_USE_CPU_ENGINE"] = "1"
        if tensor > 1:  # SGLang binds each rank to cores of its own
            environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(rank % (os.cpu_count() or 1)) for rank in range(tensor)
            )
        flags |= {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--max-total-tokens": config.max_total_tokens,
            "--max-running-requests": config.max_running,
        }
        bare = ("--sleep-on-idle",)  # it spins on a core otherwise
    elif config.count > 1:
        flags["--base-gpu-id"] = number * tensor
    # Isolated: neither our PYTHONPATH nor this folder may shadow what sglang imports.
    argv = (str(sglang.python), "-I", str(_SGLANG_SERVER), str(os.getpid()), *_words(flags), *bare, *sglang.args)
    return EngineCommand(argv=argv, environ=environ)


def _tensor_ranks(sglang: SglangConfig) -> int:
    """Tensor-parallel ranks of each server: the last flag that names them, else engine.sglang.tensor."""
    words = [word for argument in sglang.args for word in argument.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag in _TENSOR_FLAGS]
    if not given:
        return sglang.tensor
    if not given[-1].isdecimal() or int(given[-1]) < 1:
        raise ConfigError(f"engine.sglang.args names {given[-1]!r} tensor-parallel ranks; give a number of at least 1")
    return int(given[-1])


def on_cpu(config: EngineConfig) -> bool:
    """Whether the engines compute on the CPU, told without torch."""
    return config.device == "cpu" or (config.device == "auto" and not _CUDA_DEVICES.exists())


def _words(flags: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(str(part) for pair in flags.items() for part in pair)
