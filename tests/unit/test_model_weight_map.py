"""The weight map: it names exactly transformers' tensors, and cutting then joining them changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import make_model

from rlagent.trainer.model.architecture import Architecture, Experts, read_architecture
from rlagent.trainer.weight_map import join, rules, shapes, split


@st.composite
def architectures(draw: st.DrawFn) -> tuple[Architecture, int]:
    tensor = draw(st.sampled_from([1, 2, 4]))
    groups = tensor * draw(st.integers(1, 2))
    family = draw(st.sampled_from(["qwen3", "qwen2", "llama", "qwen3_moe"]))
    experts = Experts(count=2, top_k=1, ffn_size=draw(st.integers(1, 3)), normalized=False, layers=(0,))
    return Architecture(
        family=family,
        num_layers=draw(st.integers(1, 2)),
        hidden_size=8,
        num_heads=groups * draw(st.integers(1, 3)),
        num_groups=groups,
        head_size=4,
        ffn_size=tensor * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(5, 11)),
        max_positions=32,
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        rope_theta=10000.0,
        experts=experts if family == "qwen3_moe" else None,
    ), tensor


@given(architectures())
@settings(max_examples=30, deadline=None)
def test_cutting_and_joining_is_exact(case: tuple[Architecture, int]) -> None:
    arch, size = case
    for rule in rules(arch):
        tensors = [torch.randn(shape) for shape in shapes(arch, rule)]
        shards = [split(arch, rule, tensors, size=size, rank=rank) for rank in range(size)]
        assert len({shard.shape for shard in shards}) == 1
        for one, other in zip(join(arch, rule, shards), tensors, strict=True):
            assert torch.equal(one, other)


def test_q_k_and_v_are_fused_group_by_group() -> None:
    arch = Architecture(
        family="llama", num_layers=1, hidden_size=1, num_heads=4, num_groups=2, head_size=1, ffn_size=1, vocab_size=2,
        max_positions=8, norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=False, rope_theta=1e4,
    )  # fmt: skip
    rule = next(rule for rule in rules(arch) if rule.kind == "qkv")
    query, key, value = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    fused = split(arch, rule, [query, key, value], size=1, rank=0)
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert split(arch, rule, [query, key, value], size=2, rank=1)[:, 0].tolist() == [2, 3, 11, 21]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_names_and_shapes_are_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    make_model(family, tmp_path, tied=tied)
    arch = read_architecture(tmp_path)
    found = {name: shape for rule in rules(arch) for name, shape in zip(rule.hf, shapes(arch, rule), strict=True)}
    wanted = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert found == wanted
