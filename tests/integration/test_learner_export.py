"""Weights out of the learner: bit for bit what went in, in a directory that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_batch, make_learner, make_model, oracle_logprobs
from transformers import AutoModelForCausalLM

from rlagent.errors import LoadError
from rlagent.trainer import weights
from rlagent.trainer.config import LearnerConfig, OptimizerConfig
from rlagent.trainer.learner import Learner

MOVING = LearnerConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    make_model("qwen2", directory, tied=False)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("hello")
    return directory


@pytest.fixture
def learner(source: Path) -> Iterator[Learner]:
    with make_learner(source, MOVING) as made:
        yield made


def reload(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")


def test_an_export_before_any_step_is_the_checkpoint_bit_for_bit(learner: Learner, source: Path) -> None:
    wanted = load_file(source / "model.safetensors")
    found = dict(learner.export_weights())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert {tensor.dtype for _, tensor in learner.export_weights(torch.bfloat16)} == {torch.bfloat16}
    assert [name for name, _ in learner.export_weights()] == list(found)


def test_transformers_loads_what_was_trained_and_scores_it_alike(
    learner: Learner, tmp_path: Path, source: Path
) -> None:
    batch = make_batch()
    learner.train_step(batch)
    target = tmp_path / "trained"
    learner.save_hf(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trained"]
    assert (target / "chat_template.jinja").read_text() == "hello"
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    wanted = oracle_logprobs(reload(target), batch).detach()
    torch.testing.assert_close(torch.from_numpy(learner.logprobs(batch)), wanted, rtol=0, atol=1e-5)
    before = oracle_logprobs(reload(source), batch).detach()
    assert (wanted - before).abs().max() > 1e-3
    learner.save_hf(target)  # again, in place of the older one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trained"]


def test_a_large_model_is_written_in_parts_with_an_index(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", 20_000)
    learner.save_hf(tmp_path / "parts")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    exported = dict(learner.export_weights())
    loaded = reload(tmp_path / "parts").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in exported.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "no tensor 'model.norm.weight'"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"'model.norm.weight' is \(3,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    source: Path, tmp_path: Path, change: Any, named: str
) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    learner = None
    with pytest.raises(LoadError, match=named):
        learner = make_learner(tmp_path)
    assert learner is None
