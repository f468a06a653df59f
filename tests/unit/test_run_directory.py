"""A run's directory belongs to one config."""

from pathlib import Path

import pytest

from rlagent.config import Config, load_config
from rlagent.errors import ConfigError, EngineError, LoadError
from rlagent.plot import plot_reward
from rlagent.run_directory import RunDirectory


def config(path: Path, *settings: str) -> Config:
    return load_config(None, [f"run.dir={path}", "model.path=m", *settings])


def begin(path: Path, *settings: str) -> RunDirectory:
    run = RunDirectory.create(config(path, *settings))
    run.begin(config(path, *settings))
    return run


def test_a_start_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    RunDirectory.create(config(tmp_path / "run"))
    RunDirectory.create(config(tmp_path / "run", "run.seed=1"))


@pytest.mark.parametrize("error", [ConfigError("a setting"), LoadError("a file"), EngineError("it died")])
def test_a_start_that_a_setting_ends_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    run = RunDirectory.create(config(tmp_path / "runs" / "mine"))
    (run.logs / "serve.log").write_text("")
    (run.path / "buffer.db").write_text("of the serve that was started")
    with pytest.raises(type(error)), run.starting():
        raise error
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == (["runs", "runs/mine", "runs/mine/buffer.db"] if isinstance(error, EngineError) else [])


def test_a_start_that_failed_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "serve.log").write_text("of an earlier start")
    run = RunDirectory.create(config(tmp_path / "run"))
    with pytest.raises(ConfigError), run.starting():
        raise ConfigError("a setting")
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["logs", "serve.log"]


def test_a_run_that_began_is_kept_whatever_ends_it(tmp_path: Path) -> None:
    run = RunDirectory.create(config(tmp_path / "run"))
    run.begin(config(tmp_path / "run"))
    with pytest.raises(ConfigError), run.starting():
        raise ConfigError("a setting")
    assert run.config.is_file()
    assert run.logs.is_dir()


def test_a_directory_that_holds_a_run_is_not_started_anew(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    with pytest.raises(ConfigError, match="--resume"):
        RunDirectory.create(config(tmp_path / "run"))


def test_a_resume_with_another_config_names_what_differs(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.lr: 1e-06 in the run, 0\.5 now"):
        RunDirectory.reopen(config(tmp_path / "run", "learner.optimizer.lr=0.5"))


def test_a_resume_may_be_longer(tmp_path: Path) -> None:
    begin(tmp_path / "run", "run.steps=3")
    RunDirectory.reopen(config(tmp_path / "run", "run.steps=9"))


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDirectory.reopen(config(tmp_path / "run"))


def test_a_torn_last_line_of_the_metrics_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory.create(config(tmp_path / "run"))
    run.write_metrics(1, {"reward/mean": 0.5})
    run.write_metrics(2, {"reward/mean": float("nan")})
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "rew')
    assert [record["step"] for record in run.read_metrics()] == [1, 2]


@pytest.mark.parametrize("place", ["relative", "absolute"])
def test_prune_keeps_the_newest_checkpoints_and_the_named_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(config(Path("run") if place == "relative" else tmp_path / "run"))
    for step in (1, 2, 10):
        run.checkpoint(step).mkdir()
        run.snapshot(step).mkdir()
    run.prune(keep=2, snapshots={run.snapshot(10).absolute()})  # as the buffer names it
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000002", "step-000010"]
    assert [path.name for path in run.snapshots.iterdir()] == ["v000010"]
    assert run.newest_checkpoint() == run.checkpoint(10)


def test_the_plot_is_a_picture_with_and_without_evaluations(tmp_path: Path) -> None:
    for records in (
        [],
        [{"step": 0, "eval/success": 0.3}, {"step": 1, "reward/mean": 0.2}, {"step": 1, "eval/success": 0.9}],
    ):
        plot_reward(records, tmp_path / "reward.png")
        assert (tmp_path / "reward.png").read_bytes()[:4] == b"\x89PNG"
