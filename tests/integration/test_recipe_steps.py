"""Every recipe takes a step on recorded groups, through the learner and without engines: it trains, and on what it says it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from groups import row
from tiny_models import VOCAB, make_learner, make_model

from rlagent.config import load_config
from rlagent.trainer.batch import pack
from rlagent.trainer.config import LearnerConfig
from rlagent.types import GREEDY, Group, Reward, Rollout

pytestmark = pytest.mark.slow
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
MASKS = ([0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1])
REWARDS = ((1.0, 0.0, 0.25, 0.0), (0.0, 1.0, 1.0, 0.5))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model("qwen3", directory, layers=2)
    return directory


def recorded() -> list[Group]:
    """Two groups of four rollouts with two components of reward, one of a call, and the reward of a greedy rollout."""
    return [
        Group(
            group_id=f"g{number}",
            rollouts=tuple(
                Rollout(
                    rollout_id=f"g{number}-{place}",
                    task_id="t",
                    reward=Reward(
                        components={"correct": reward, "short": 0.1 * place}, calls={"c": 0.2 * place, GREEDY: 0.5}
                    ),
                    rows=(row(mask, rollout_id=f"g{number}-{place}", first_id=7 * number + place),),
                )
                for place, (mask, reward) in enumerate(zip(MASKS, rewards, strict=True))
            ),
        )
        for number, rewards in enumerate(REWARDS)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_takes_a_step(name: str, model_dir: Path) -> None:
    learner: LearnerConfig = load_config(RECIPES / f"{name}.toml").learner
    batch = pack(recorded(), advantage=learner.advantage, loss=learner.loss, max_row_tokens=64).batch
    assert int(batch.token_ids.max()) < VOCAB
    if learner.loss.name == "opd":
        batch = replace(batch, teacher_logprobs=np.where(batch.loss_mask, np.float32(-1), np.float32(0)))
    with make_learner(model_dir, learner) as one:
        before = one.logprobs(batch)
        batch = replace(batch, rollout_logprobs=before)  # sampled by this very policy
        records = [one.train_step(batch) for _ in range(2)]
        after = one.logprobs(batch)
    assert all(np.isfinite(list(record.values())).all() for record in records)
    assert np.abs(after - before)[batch.loss_mask].max() > 1e-4
    assert ("value/loss" in records[0]) == (learner.advantage.name == "gae")
    assert ("policy/kl_reference" in records[0]) == (learner.loss.kl_coef > 0)
    assert ("policy/correction_rejected" in records[0]) == (learner.correction.name != "none")
    assert records[0]["learner/updates"] == learner.batch.updates
    if learner.loss.name == "sft":
        assert records[1]["policy/loss"] < records[0]["policy/loss"]
    if learner.loss.name == "dpo":
        assert records[1]["preference/loss"] < records[0]["preference/loss"] == pytest.approx(np.log(2))
