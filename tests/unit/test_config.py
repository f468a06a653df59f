"""The settings tree: what is refused, and with which words."""

from pathlib import Path

import pytest

from rlagent.config import Config, absolute_paths, build_config, dump_config, load_config
from rlagent.errors import ConfigError


def test_defaults_are_a_valid_config() -> None:
    assert load_config(None) == Config()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lerner.x=1", ["lerner", "did you mean 'learner'"]),
        ("learner.optimizer.lrr=1", ["learner.optimizer.lrr", "did you mean 'lr'"]),
        ("learner.optimizer.lr=-1", ["learner.optimizer.lr", "-1", "greater than 0"]),
        ("learner.optimizer.lr=inf", ["learner.optimizer.lr = inf", "finite"]),
        ("learner.loss.entropy_coef=nan", ["learner.loss.entropy_coef = nan", "finite"]),
        ("rollout.timeout_s=Infinity", ["rollout.timeout_s = inf", "finite"]),
        ("rollout.timeout_s=soon", ["rollout.timeout_s = 'soon'", "number"]),
        ("router.port=99999", ["router.port", "99999"]),
        ("learner.loss.aggregation=tokenmean", ["learner.loss.aggregation", "tokenmean", "token_mean"]),
        ("parallel.sequence=true", ["parallel.tensor"]),
        ("parallel.expert=2", ["parallel.expert = 2", "tensor * context * data"]),
        ("parallel.virtual_pipeline=2", ["parallel.virtual_pipeline = 2", "parallel.pipeline"]),
        ("sampling.temperature=0", ["sampling.temperature", "eval.temperature"]),
        ("rollout.function=a.py:f", ["rollout.tasks"]),
        ("run.steps", ["a.b=c"]),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_the_fix(setting: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    for word in words:
        assert word in str(caught.value)


def test_a_list_whose_only_item_is_refused_is_not_also_called_too_short() -> None:
    with pytest.raises(
        ConfigError, match=r"^learner\.lora\.targets\.0 = 'qq_proj': Input should be 'q_proj', .*'down_proj'$"
    ):
        load_config(None, ['learner.lora.targets=["qq_proj"]'])
    with pytest.raises(ConfigError, match="at least 1 item"):
        load_config(None, ["learner.lora.targets=[]"])


def test_set_wins_over_the_file_and_overrides_over_both(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nsteps = 3\nseed = 1\n[learner.optimizer]\nlr = 0.5\n")
    config = load_config(file, ["run.steps=4", "learner.optimizer.lr=0.25"], {"run.seed": 7, "router.admin_key": None})
    assert (config.run.steps, config.run.seed, config.learner.optimizer.lr) == (4, 7, 0.25)
    assert config.router.admin_key is None


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npath = "m"\n[rollout]\nfunction = "r.py:f"\ntasks = "t.jsonl"\n'
        '[learner]\nloss.name = "l.py:f"\nadvantage.name = "package.a:f"\n'
    )
    config = load_config(file)
    assert config.model.path == tmp_path / "m"
    assert config.rollout.tasks == tmp_path / "t.jsonl"
    assert config.rollout.function == f"{tmp_path / 'r.py'}:f"
    assert config.learner.loss.name == f"{tmp_path / 'l.py'}:f"
    assert config.learner.advantage.name == "package.a:f"


def test_files_that_extend_one_another_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"a\.toml' extends itself, by way of .*b\.toml"):
        load_config(tmp_path / "a.toml")


def test_the_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    import tomllib

    config = absolute_paths(load_config(None, ["model.path=m", "run.steps=5", "learner.loss.dual_clip=3.0"]))
    assert build_config(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize("text", ["a = [", 'x = "\n'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")


def test_the_model_directory_must_be_set() -> None:
    with pytest.raises(ConfigError, match="--model DIR"):
        _ = Config().model_dir
