"""Metrics to TensorBoard and Weights & Biases, when asked for; metrics.jsonl is written in any case.

In the flow: train.py calls each tracker with a step and its metrics. Neither package is imported unless its setting is on.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlagent.config import TrackConfig
from rlagent.errors import LoadError

Tracker = Callable[[int, Mapping[str, Any]], None]


def trackers(config: TrackConfig, run: Path) -> list[Tracker]:
    """What `config` asks for. LoadError where a package is missing."""
    found: list[Tracker] = []
    if config.tensorboard:
        found.append(_tensorboard(run / "tensorboard"))
    if config.wandb_project is not None:
        found.append(_wandb(config, run))
    return found


def _tensorboard(directory: Path) -> Tracker:
    writer = _load("tensorboard.summary", "tensorboard").Writer(str(directory))

    def track(step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(config: TrackConfig, run: Path) -> Tracker:
    started = _load("wandb", "wandb").init(
        project=config.wandb_project, name=run.name, dir=str(run), mode=config.wandb_mode, resume="allow"
    )

    def track(step: int, metrics: Mapping[str, Any]) -> None:
        started.log(dict(metrics), step=step)

    return track


def _load(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LoadError(
            f"[track] asks for {extra}, which is not installed; pip install 'rlagent-rl[{extra}]', or turn it off"
        ) from error
