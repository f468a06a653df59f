"""reward.png: training reward and held-out success over the steps of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_reward(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the records of metrics.jsonl. Uses no global state of matplotlib, so that it works anywhere."""
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(r["step"], r["reward/mean"]) for r in records if "reward/mean" in r]
    held_out = [(r["step"], r["eval/success"]) for r in records if "eval/success" in r]
    if train:
        axes.plot(*zip(*train, strict=True), color="#7a8ca3", linewidth=1.2, label="reward of the rollouts trained on")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color="#c2410c", linewidth=2, marker="o", label="success on held-out tasks"
        )
        step, success = held_out[-1]
        axes.annotate(f"{success:.2f}", (step, success), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set_xlabel("learner step")
    axes.set_ylim(-0.02, max(1.08, *(value for _, value in train), 1.08) if train else 1.08)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if train or held_out:
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
