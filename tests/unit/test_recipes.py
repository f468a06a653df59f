"""Every recipe loads, says what it is, and differs from the settings that it extends in nothing but the algorithm."""

from pathlib import Path

import pytest

from rlagent.config import load_config
from rlagent.errors import ConfigError
from rlagent.trainer.config import CORRECTIONS, ESTIMATORS, LOSSES

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
ALGORITHM = {"learner", "buffer"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads_and_is_the_base_but_for_the_algorithm(name: str) -> None:
    base = load_config(RECIPES / "../parcels/run.toml").model_dump()
    found = load_config(RECIPES / f"{name}.toml").model_dump()
    assert {part for part in base if base[part] != found[part]} <= ALGORITHM
    assert found["learner"]["optimizer"] == base["learner"]["optimizer"]
    assert (RECIPES / f"{name}.toml").read_text().startswith("# ")
    assert f"[{name}.toml]" in (RECIPES / "README.md").read_text()


def test_every_name_has_a_recipe() -> None:
    learners = [load_config(RECIPES / f"{name}.toml").learner for name in NAMES]
    assert {learner.advantage.name for learner in learners} == set(ESTIMATORS)
    assert {learner.loss.name for learner in learners} == set(LOSSES)
    assert {learner.correction.name for learner in learners} == set(CORRECTIONS)


def test_what_a_file_extends_is_read_from_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "run.toml").write_text('[model]\npath = "m"\n[run]\nsteps = 3\nseed = 2\n')
    (tmp_path / "mine.toml").write_text('extends = "base/run.toml"\n[run]\nsteps = 5\n')
    config = load_config(tmp_path / "mine.toml", ["run.seed=4"])
    assert config.model.path == tmp_path / "base" / "m"
    assert (config.run.steps, config.run.seed) == (5, 4)
    (tmp_path / "mine.toml").write_text("extends = 3\n")
    with pytest.raises(ConfigError, match="extends = 3"):
        load_config(tmp_path / "mine.toml")
