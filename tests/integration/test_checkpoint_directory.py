"""Directories that appear whole or not at all, on the real disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlagent.trainer import checkpoint


def save(directory: Path, step: int, content: str = "x") -> None:
    partial = checkpoint.begin(directory)
    (partial / "shard").write_text(content)
    manifest = checkpoint.Manifest(
        step=step, layout={}, model={}, config_digest="", files=(checkpoint.record(partial / "shard"),), extra={}
    )
    checkpoint.write_manifest(partial, manifest)
    checkpoint.commit(directory)


def test_a_save_that_never_ended_is_not_seen_and_does_not_hinder_the_next(tmp_path: Path) -> None:
    save(tmp_path / "step-1", 1)
    torn = checkpoint.begin(tmp_path / "step-2")
    (torn / "shard").write_text("half")
    assert checkpoint.checkpoints(tmp_path) == [tmp_path / "step-1"]
    save(tmp_path / "step-2", 2)
    assert checkpoint.checkpoints(tmp_path) == [tmp_path / "step-1", tmp_path / "step-2"]


def test_a_later_save_of_the_same_name_takes_its_place(tmp_path: Path) -> None:
    save(tmp_path / "last", 1, "old")
    save(tmp_path / "last", 2, "new")
    assert (tmp_path / "last" / "shard").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_the_newest_are_kept_by_step_and_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path / f"step-{step}", step)
    checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-10", "step-100"]
    assert checkpoint.checkpoints(tmp_path / "nowhere") == []


def test_the_driver_can_look_at_checkpoints_without_torch() -> None:
    code = "import sys, rlagent.trainer.checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
