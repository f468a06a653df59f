"""A run's directory: its resolved config, metrics, checkpoints, snapshots, logs, and the trained model.

    config.toml  metrics.jsonl  reward.png  buffer.db  checkpoints/  snapshots/  logs/  model/

Invariant: one directory belongs to one config; a resume with settings that change what is learned is refused.
"""

import json
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from rlagent.config import Config, absolute_paths, build_config, dump_config
from rlagent.errors import ConfigError, LoadError

# Settings that may differ between a run and its resume: they change how, not what, is learned.
_FREE_ON_RESUME: Final = ("run.steps", "run.dir", "eval.", "checkpoint.", "router.", "engine.", "rollout.workers",
                          "rollout.concurrency", "rollout.timeout_s", "buffer.path", "buffer.url", "learner.threads", "alarms", "track.",
                          "parallel.")  # fmt: skip


class RunDirectory:
    """The files of one run. Made by `create` or `reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.snapshots = path / "snapshots"
        self.model = path / "model"
        self.metrics = path / "metrics.jsonl"
        self.alarms = path / "alarms.jsonl"
        self.reward_plot = path / "reward.png"
        self.config = path / "config.toml"
        self.failures = self.logs / "failed_rollouts.log"
        self._made: list[Path] = []  # directories that were not there before, the outermost first

    @classmethod
    def create(cls, config: Config) -> "RunDirectory":
        """Make a new run's directory. ConfigError if it holds a run already. `begin` makes it a run."""
        run = cls(config.run.dir)
        if run.config.exists():
            raise ConfigError(
                f"run directory {str(run.path)!r} holds a run already; go on with it by --resume, or name another by "
                "--run-dir DIR"
            )
        run._make()
        return run

    @classmethod
    def reopen(cls, config: Config) -> "RunDirectory":
        """Go on in an existing directory. ConfigError if there is none, or its run was of another config."""
        run = cls(config.run.dir)
        if not run.config.exists():
            raise ConfigError(
                f"run directory {str(run.path)!r} holds no run to resume; leave --resume away to start one"
            )
        before = _flat(build_config(tomllib.loads(run.config.read_text())).model_dump(mode="json"))
        now = _flat(absolute_paths(config).model_dump(mode="json"))
        changed = [name for name in now if before.get(name) != now[name] and not name.startswith(_FREE_ON_RESUME)]
        if changed:
            lines = "\n".join(f"  {name}: {before.get(name)!r} in the run, {now[name]!r} now" for name in changed)
            raise ConfigError(
                f"run directory {str(run.path)!r} is of another config; resume with the same settings, or start anew by "
                f"--run-dir DIR\n{lines}"
            )
        run._make()
        return run

    def _make(self) -> None:
        wanted = (*reversed(self.path.parents), self.path, self.logs, self.checkpoints, self.snapshots)
        try:
            for directory in wanted:
                if not directory.is_dir():
                    directory.mkdir(exist_ok=True)
                    self._made.append(directory)
        except OSError as error:
            self._unmake(empty_only=True)
            raise ConfigError(
                f"run directory {str(self.path)!r} cannot be made: {error}; name another by --run-dir DIR"
            ) from error

    def begin(self, config: Config) -> None:
        """Write the resolved config: from now on the directory holds a run. A start that failed before leaves none."""
        self.config.write_text(dump_config(absolute_paths(config)), encoding="utf-8")
        self._made.clear()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around everything up to `begin`: what `create` made goes again when a setting is at fault.

        After any other failure only what holds nothing goes: a log may say why.
        """
        try:
            yield
        except BaseException as error:
            self._unmake(empty_only=not isinstance(error, (ConfigError, LoadError)))
            raise

    def _unmake(self, *, empty_only: bool) -> None:
        """Take back the directories that this object made; those that hold something too, unless `empty_only`."""
        for directory in reversed(self._made):
            if not empty_only and directory.is_relative_to(self.path):
                shutil.rmtree(directory, ignore_errors=True)
                continue
            for log in directory.glob("*.log"):
                if not log.stat().st_size:
                    log.unlink()
            with suppress(OSError):  # it holds something, also of someone else
                directory.rmdir()
        self._made.clear()

    def snapshot(self, version: int) -> Path:
        """Where the Hugging Face snapshot of a version stands."""
        return self.snapshots / f"v{version:06d}"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` steps stands."""
        return self.checkpoints / f"step-{step:06d}"

    def newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint (saves are atomic: what has this name is whole)."""
        return max(self.checkpoints.glob("step-" + "[0-9]" * 6), default=None)

    def prune(self, *, keep: int, snapshots: set[Path]) -> None:
        """Delete all but the newest `keep` checkpoints, and all snapshots but those named."""
        for old in sorted(self.checkpoints.glob("step-" + "[0-9]" * 6))[:-keep]:
            shutil.rmtree(old)
        kept = {snapshot.absolute() for snapshot in snapshots}
        for directory in self.snapshots.iterdir():
            if directory.absolute() not in kept:
                shutil.rmtree(directory)

    def write_failure(self, session_id: str, status: str, error: str) -> None:
        """Append what ended a rollout, with its traceback, to logs/failed_rollouts.log."""
        with self.failures.open("a", encoding="utf-8") as file:
            file.write(f"{session_id} {status}\n{error.rstrip()}\n\n")

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        line = json.dumps({"step": step, "time": time.time(), **metrics}, allow_nan=True)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl (a kill may have torn the last)."""
        records = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        return records


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(_flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
