"""The start of examples/small_envs: configurations that load, players that are right where they are careful, a model made again."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlagent.config import load_config
from rlagent.envs import reasoning
from rlagent.envs.verifiers import Attempt
from rlagent.loading import load_function

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "small_envs"


def loaded(file: str, name: str) -> Any:
    return load_function(f"{EXAMPLE / file}:{name}", what="example")


@pytest.mark.parametrize("name", ["sums", "coin"])
def test_a_configuration_names_what_the_warm_start_writes(name: str) -> None:
    config = load_config(EXAMPLE / f"{name}.toml")
    assert config.model_dir == EXAMPLE / name / "model"
    assert (config.rollout.tasks, config.eval.tasks) == (
        EXAMPLE / name / "train.jsonl",
        EXAMPLE / name / "heldout.jsonl",
    )
    assert config.rollout.function is not None
    assert callable(load_function(config.rollout.function, what="rollout function"))


def test_sums_are_worked_out_and_held_out() -> None:
    train, heldout = loaded("sums.py", "tasks")(40, 20)
    assert not {task["question"] for task in train} & {task["question"] for task in heldout}
    careful = loaded("sums.py", "conversations")(train, 0.0, random.Random(0))
    for task, (_, said) in zip(train, careful, strict=True):
        attempt = Attempt(task=task, answer=said["content"], messages=(), calls=(), session=None)  # type: ignore[arg-type]
        assert reasoning.score(attempt) == 1.0, (task["question"], said["content"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="TextWorld-Express needs Java")
def test_a_careful_player_finds_the_coin_and_a_careless_one_seldom() -> None:
    train, heldout = loaded("coin.py", "tasks")(20, 5)
    assert (len(train), len(heldout)) == (20, 5)
    play = loaded("coin.py", "conversations")
    ended = [sum(game[-1]["content"] == "take coin" for game in play(train, c, random.Random(0))) for c in (0.0, 1.0)]
    assert ended[0] >= 18
    assert ended[1] <= 12


@pytest.mark.slow
def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make = loaded("warm_start.py", "make")
    for name in ("one", "again"):
        make("sums", tmp_path / name, num_steps=2, num_train=300, num_heldout=5)
    files = ("train.jsonl", "heldout.jsonl", "model/model.safetensors", "model/tokenizer.json")
    assert [(tmp_path / "one" / file).read_bytes() for file in files] == [
        (tmp_path / "again" / file).read_bytes() for file in files
    ]
