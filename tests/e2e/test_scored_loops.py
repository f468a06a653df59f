"""Algorithms whose credit is made of scores, or of none, through the whole loop: what they minimise falls, and the engine follows.

What they minimise is measured by transformers on what was trained on, before and after: rewards and samples decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import demo
import pytest
import torch
from engine_process import running_engine
from tiny_models import oracle_logprobs
from transformers import AutoModelForCausalLM

from rlagent.recorded import recorded_buffer, recorded_config
from rlagent.trainer.batch import pack
from rlagent.types import Batch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("e2e")]
RECIPES = demo.ROOT / "examples" / "recipes"
START = demo.ROOT / "examples" / "parcels" / "model"
ROLLOUT = f"{demo.ROOT / 'tests' / 'support' / 'one_turn.py'}:rollout"
Measure = Callable[[Any, Batch], torch.Tensor]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with all logits halved: it says the same things less surely, so that there is something to learn."""
    directory = tmp_path_factory.mktemp("student") / "model"
    copytree(START, directory)
    model = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)
    model.save_pretrained(directory)
    return directory


def loop(recipe: str, student: Path, directory: Path, *settings: str) -> list[dict[str, float]]:
    """A few steps of a recipe; the metrics of each. The rate falls to 0 at the last one, whose batch the policy that was made samples."""
    given = (
        *demo.SMALL,
        f"model.path={student}",
        f"rollout.function={ROLLOUT}",
        "eval.num_tasks=1",
        "buffer.max_staleness=0",
        *settings,
    )
    sets = [part for setting in given for part in ("--set", setting)]
    demo.command(
        "train", "--config", str(RECIPES / f"{recipe}.toml"), "--run-dir", str(directory), *sets, timeout_s=600
    )
    return [record for record in demo.metrics(directory) if record["step"] > 0]


async def trained_on(directory: Path) -> list[Batch]:
    """The batches of a run, packed as its learner was given them."""
    config = recorded_config(directory).learner
    async with recorded_buffer(directory) as buffer:
        steps = [await buffer.consumed(each.batch) for each in await buffer.lineage()]
    return [pack(groups, advantage=config.advantage, loss=config.loss, max_row_tokens=1024).batch for groups in steps]


async def before_and_after(student: Path, directory: Path, measure: Measure) -> tuple[float, float]:
    """The mean over the batches that moved the policy, under the model it began with and the one it ended with."""
    batches = (await trained_on(directory))[:-1]
    found = []
    for place in (student, directory / "model"):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        with torch.no_grad():
            found.append(float(torch.stack([measure(model, batch) for batch in batches]).mean()))
    return found[0], found[1]


def engine_follows(records: list[dict[str, float]]) -> None:
    """The engine samples by the very weights that were trained."""
    assert records[-1]["policy/version"] == len(records)
    assert records[-1]["mismatch_fresh/abs_max"] < 1e-3


async def test_sft_makes_what_was_sampled_likelier(student: Path, tmp_path: Path) -> None:
    records = loop("sft", student, tmp_path / "run", "run.steps=2")
    engine_follows(records)

    def cross_entropy(model: Any, batch: Batch) -> torch.Tensor:
        return -oracle_logprobs(model, batch).sum() / batch.num_sampled

    before, after = await before_and_after(student, tmp_path / "run", cross_entropy)
    assert after < before - 0.05
    first = (await trained_on(tmp_path / "run"))[0]  # the metric is that number, at the step's start
    start = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    assert records[0]["policy/loss"] == pytest.approx(cross_entropy(start, first).item(), rel=1e-4)


async def test_dpo_widens_the_margin_of_the_pairs_it_was_given(student: Path, tmp_path: Path) -> None:
    records = loop("dpo", student, tmp_path / "run", "run.steps=2")
    engine_follows(records)
    assert [record["preference/pairs"] for record in records] == [2, 2]
    assert records[0]["preference/loss"] == pytest.approx(0.6931, abs=1e-4)

    def chosen_less_rejected(model: Any, batch: Batch) -> torch.Tensor:
        return (oracle_logprobs(model, batch) * torch.from_numpy(batch.advantages).sign()).sum()

    before, after = await before_and_after(student, tmp_path / "run", chosen_less_rejected)
    assert after > before + 0.5


async def test_opd_brings_the_student_to_its_teacher(student: Path, tmp_path: Path) -> None:
    """The teacher is the demo's model as it ships."""
    teacher = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    with running_engine(START, "--device", "cpu") as url:
        records = loop("opd", student, tmp_path / "run", f"learner.teacher.url={url}")
    engine_follows(records)

    def reverse_kl(model: Any, batch: Batch) -> torch.Tensor:
        ids = torch.from_numpy(batch.token_ids).long().split(torch.from_numpy(batch.cu_seqlens).diff().tolist())
        masks = torch.from_numpy(batch.loss_mask).split([len(row) for row in ids])
        found = []
        for row, mask in zip(ids, masks, strict=True):
            own, theirs = (m(row[None]).logits[0, :-1][mask[1:]].log_softmax(-1) for m in (model, teacher))
            found.append((own.exp() * (own - theirs)).sum(-1))
        return torch.cat(found).mean()

    before, after = await before_and_after(student, tmp_path / "run", reverse_kl)
    assert after < 0.9 * before
    assert records[0]["distillation/reverse_kl"] > 0
