"""Reading config.json: rotary frequencies to the last bit, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LLAMA3_ROPE
from transformers import LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlagent.errors import LearnerError, LoadError
from rlagent.trainer.config import ParallelConfig
from rlagent.trainer.model.architecture import read_architecture
from rlagent.trainer.model.build import check_layout, stage_layers

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
}


def write(directory: Path, **changes: Any) -> Path:
    fields = {key: value for key, value in {**PLAIN, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 500000.0}, LLAMA3_ROPE])
@pytest.mark.parametrize("old_names", [False, True])
def test_rotary_frequencies_are_transformers(tmp_path: Path, rope: dict[str, Any], old_names: bool) -> None:
    config = LlamaConfig(**{key: value for key, value in PLAIN.items() if key != "model_type"}, rope_parameters=rope)
    wanted = LlamaRotaryEmbedding(config).inv_freq
    named = {"rope_theta": rope["rope_theta"], "rope_scaling": rope} if old_names else {"rope_parameters": rope}
    assert torch.equal(read_architecture(write(tmp_path, **named)).inverse_frequencies(), wanted)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'factor' is missing"),
        ({"intermediate_size": ...}, "'intermediate_size' is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True},
            "gates of 1",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read_architecture(write(tmp_path, **changes))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_config_is_no_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(LoadError, match=r"config\.json"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        (ParallelConfig(tensor=3), "parallel.tensor = 3"),
        (ParallelConfig(pipeline=4), "parallel.pipeline = 4"),
        (ParallelConfig(pipeline=2, virtual_pipeline=2), "parallel.virtual_pipeline = 2"),
        (ParallelConfig(expert=2, data=2), "parallel.expert = 2: the model is dense"),
    ],
)
def test_a_layout_that_cannot_cut_the_model_is_refused(tmp_path: Path, parallel: ParallelConfig, named: str) -> None:
    with pytest.raises(LearnerError, match=named):
        check_layout(read_architecture(write(tmp_path)), parallel)


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        (ParallelConfig(expert=4, data=4), "parallel.expert = 4 does not divide the model's 6 experts"),
        (ParallelConfig(tensor=2), "parallel.sequence = true"),
    ],
)
def test_a_layout_that_cannot_deal_out_the_experts_is_refused(
    tmp_path: Path, parallel: ParallelConfig, named: str
) -> None:
    with pytest.raises(LearnerError, match=named):
        check_layout(read_architecture(write(tmp_path, **EXPERTS)), parallel)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2)),
        ({"mlp_only_layers": [1]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [0, 1, 2]}, ()),
    ],
)
def test_which_layers_have_experts_is_transformers(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    arch = read_architecture(write(tmp_path, **EXPERTS, **changes))
    assert tuple(layer for layer in range(3) if arch.has_experts(layer)) == layers
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**PLAIN, **EXPERTS, **changes}))
    assert tuple(n for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")) == layers


@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (8, 4), (7, 3), (5, 5)])
def test_stages_hold_every_layer_once_and_differ_by_at_most_one(layers: int, stages: int) -> None:
    found = stage_layers(layers, stages)
    assert [layer for part in found for layer in part] == list(range(layers))
    assert max(map(len, found)) - min(map(len, found)) <= 1
