"""Algorithms that change the loop itself, as a user starts them from their recipes: real processes, made small."""

from pathlib import Path

import demo
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("e2e")]
RECIPES = demo.ROOT / "examples" / "recipes"


def run(recipe: str, directory: Path, *settings: str) -> list[dict[str, float]]:
    small = [part for setting in (*demo.SMALL, "run.steps=2", *settings) for part in ("--set", setting)]
    demo.command("train", "--config", str(RECIPES / f"{recipe}.toml"), "--run-dir", str(directory), *small)
    return [record for record in demo.metrics(directory) if record["step"] > 0]


def test_ppo_trains_a_critic_and_resumes_with_it(tmp_path: Path) -> None:
    records = run("ppo", tmp_path / "run")
    for record in records:  # its head begins at 0: where no rollout has succeeded yet it is right already
        assert (record["value/grad_norm"] > 0) == (record["value/squared_error"] > 0)
    small = [part for setting in (*demo.SMALL, "run.steps=3") for part in ("--set", setting)]
    demo.command("train", "--config", str(RECIPES / "ppo.toml"), "--run-dir", str(tmp_path / "run"), *small, "--resume")
    assert [record["step"] for record in demo.metrics(tmp_path / "run") if record["step"] > 0] == [1, 2, 3]


def test_remax_has_a_greedy_rollout_of_every_task(tmp_path: Path) -> None:
    records = run("remax", tmp_path / "run", "sync.release_kv_cache=true")  # and engines lend their memory to each step
    assert len(records) == 2
    assert all(record["data/num_groups"] == 2 for record in records)


def test_dynamic_sampling_asks_for_groups_in_place_of_those_without_variance(tmp_path: Path) -> None:
    records = run("dapo", tmp_path / "run", "buffer.max_staleness=0", "rollout.group_size=2")
    assert len(records) == 2
    assert sum(record["data/groups_left_out"] for record in records) > 0
    assert all(record["reward/groups_without_variance"] == 0 for record in records)
    replayed = demo.command("train", "--replay", str(tmp_path / "run"), "--run-dir", str(tmp_path / "again"))
    assert "replayed 2 steps: every step is the recorded one, bit for bit" in replayed


def test_adapters_on_drawn_tasks_are_published_and_resumed(tmp_path: Path) -> None:
    """Every publish compares checksums of the merged weights; what is known of the tasks is in the checkpoint."""
    drawn = ("rollout.draw.by=prioritised", "sync.verify_every=1", "buffer.max_staleness=0")
    records = run("lora", tmp_path / "run", *drawn)
    assert all("policy/kl_reference" in record for record in records)
    small = [part for setting in (*demo.SMALL, "run.steps=3", *drawn) for part in ("--set", setting)]
    demo.command(
        "train", "--config", str(RECIPES / "lora.toml"), "--run-dir", str(tmp_path / "run"), *small, "--resume"
    )
    seen = [record["tasks/seen"] for record in demo.metrics(tmp_path / "run") if record["step"] > 0]
    assert seen == sorted(seen)
    assert seen[2] > seen[0] > 0, "the third step knows the tasks of the first"
