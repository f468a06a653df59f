"""What a person sees of a run: a live table in a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_SHOWN_STEPS: Final = 14
_BAR_CELLS: Final = 24
_NARROW: Final = (
    90  # columns of a terminal below which the table leaves mismatch and tokens/s away, and its bar is short
)
_STAGES: Final = {"rollout": "cyan", "train": "magenta", "sync": "yellow", "eval": "green", "checkpoint": "blue"}


class Display:
    """Shows the records of metrics.jsonl as they are written. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._title = ""
        self._state = "starting"
        self._success: float | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._live = Live(console=self.console, refresh_per_second=4, get_renderable=self._render, transient=False)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def title(self, text: str) -> None:
        """Name the run."""
        self._title = text
        if not self.console.is_terminal:
            self.console.print(text, highlight=False, soft_wrap=True)

    def state(self, text: str) -> None:
        """Say what the run is doing now."""
        self._state = text

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def evaluated(self, step: int, success: float, reward: float, num_tasks: int) -> None:
        """An evaluation ended."""
        self._success = success
        self.console.print(
            f"eval  step {step:4d}  success {success:.3f}  reward {reward:.3f}  on {num_tasks} held-out tasks",
            highlight=False,
        )

    def stepped(self, record: Mapping[str, Any]) -> None:
        """A learner step ended; `record` is its line of metrics.jsonl."""
        self._rows = [*self._rows[1 - _SHOWN_STEPS :], {**record, "success": self._success}]
        if not self.console.is_terminal:
            shares = " ".join(f"{stage} {share:.0%}" for stage, share in _shares(record).items())
            self.console.print(
                f"step {record['step']:4d}  reward {record.get('reward/mean', float('nan')):.3f}  "
                f"{record['throughput/tokens_per_s']:6.0f} tok/s  lag {record.get('freshness/lag_max', 0):.0f}  "
                f"{record['time/step_s']:5.1f} s  {shares}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip

    def _render(self) -> Group:
        narrow = self.console.width < _NARROW
        table = Table(title=self._title, title_justify="left", expand=False)
        headings = ("step", "success", "reward", "lag", "s")
        for heading in headings if narrow else (*headings, "tokens/s", "mismatch"):
            table.add_column(heading, justify="right")
        table.add_column("stages" if narrow else "share of the stages")
        for record in self._rows:
            cells = [
                str(record["step"]),
                "-" if record["success"] is None else f"{record['success']:.2f}",
                f"{record.get('reward/mean', float('nan')):.3f}",
                f"{record.get('freshness/lag_max', 0):.0f}",
                f"{record['time/step_s']:.1f}",
            ]
            if not narrow:
                cells += [f"{record['throughput/tokens_per_s']:.0f}", f"{record.get('mismatch/abs_max', 0.0):.1e}"]
            table.add_row(*cells, _bar(record, _BAR_CELLS // 2 if narrow else _BAR_CELLS))
        legend = Text.assemble(*((f"█ {stage}  ", color) for stage, color in _STAGES.items()))
        return Group(table, legend, Text(self._state, style="dim"))


def _shares(record: Mapping[str, Any]) -> dict[str, float]:
    total = record["time/step_s"]
    spent = {stage: record.get(f"time/{stage}_s", 0.0) for stage in _STAGES}
    return {stage: seconds / total for stage, seconds in spent.items() if seconds > 0 and total > 0}


def _bar(record: Mapping[str, Any], cells: int) -> Text:
    bar = Text()
    for stage, share in _shares(record).items():
        bar.append("█" * round(share * cells), _STAGES[stage])
    return bar
