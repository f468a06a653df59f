"""Metrics to TensorBoard's own files, read back by its own reader; a missing package is named."""

import sys
import warnings
from pathlib import Path

import pytest

from rlagent.config import TrackConfig
from rlagent.errors import LoadError
from rlagent.track import trackers


def test_nothing_unless_asked_for(tmp_path: Path) -> None:
    assert trackers(TrackConfig(), tmp_path) == []


def test_tensorboard_reads_what_was_tracked(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (track,) = trackers(TrackConfig(tensorboard=True), tmp_path)
        track(3, {"reward/mean": 0.5})
        track(4, {"reward/mean": 0.75})
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        found = [(event.step, float(event.tensor_proto.float_val[0])) for event in events.Tensors("reward/mean")]
    assert found == [(3, 0.5), (4, 0.75)]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LoadError, match=r"rlagent-rl\[wandb\]"):
        trackers(TrackConfig(wandb_project="p"), tmp_path)
