"""What SGLang's checker should answer: fused tensors, cut for tensor parallelism, the vocabulary padded."""

import hashlib

import pytest
import torch

from rlagent.trainer.weight_sync.checksums import FusedChecksums


def short(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_the_parts_of_two_ranks() -> None:
    q, k, v = (torch.randn(rows, 6) for rows in (8, 4, 4))
    gate, up, down, o = torch.randn(10, 6), torch.randn(10, 6), torch.randn(6, 10), torch.randn(6, 8)
    embed, norm = torch.randn(70, 6), torch.randn(6)
    fused = FusedChecksums(2)
    layer = "model.layers.0."
    for name, tensor in (
        ("self_attn.k_proj.weight", k), ("mlp.up_proj.weight", up), ("self_attn.q_proj.weight", q), ("mlp.down_proj.weight", down),
        ("self_attn.o_proj.weight", o), ("mlp.gate_proj.weight", gate), ("self_attn.v_proj.weight", v), ("input_layernorm.weight", norm),
    ):  # fmt: skip
        fused.add(layer + name, tensor)
    fused.add("model.embed_tokens.weight", embed)
    padded, wide = torch.zeros(128, 6), torch.zeros(3, 64, 6)  # a feed-forward's width is filled up to 32 a rank
    padded[:70], wide[0, :10], wide[1, :10], wide[2, :10] = embed, gate, up, down.T
    for rank in (0, 1):
        assert fused.of_rank(rank) == {
            f"{layer}self_attn.qkv_proj.weight": short(
                torch.cat((q[4 * rank :][:4], k[2 * rank :][:2], v[2 * rank :][:2]))
            ),
            f"{layer}mlp.gate_up_proj.weight": short(wide[:2, 32 * rank :][:, :32].flatten(0, 1)),
            f"{layer}mlp.down_proj.weight": short(wide[2, 32 * rank :][:32].T),
            f"{layer}self_attn.o_proj.weight": short(o[:, 4 * rank :][:, :4]),
            f"{layer}input_layernorm.weight": short(norm),
            "model.embed_tokens.weight": short(padded[64 * rank :][:64]),
        }


def test_factors_of_float8_blocks_are_cut_as_their_weights_are() -> None:
    q, k, v, o = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 4)
    fused = FusedChecksums(2)
    for name, scale in (("q", q), ("k", k), ("v", v), ("o", o)):
        fused.add(f"model.layers.0.self_attn.{name}_proj.weight_scale_inv", scale)
    for rank in (0, 1):
        assert fused.of_rank(rank) == {
            "model.layers.0.self_attn.qkv_proj.weight_scale_inv": short(
                torch.cat((q[2 * rank :][:2], k[rank:][:1], v[rank:][:1]))
            ),
            "model.layers.0.self_attn.o_proj.weight_scale_inv": short(o[:, 2 * rank :][:, :2]),
        }


def test_a_fused_tensor_waits_for_all_its_parts() -> None:
    fused = FusedChecksums(1)
    fused.add("model.layers.3.self_attn.q_proj.bias", torch.ones(4))
    fused.add("model.layers.3.self_attn.k_proj.bias", torch.ones(2))
    assert fused.of_rank(0) == {}
    fused.add("model.layers.3.self_attn.v_proj.bias", torch.zeros(2))
    expected = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0])
    assert fused.of_rank(0) == {"model.layers.3.self_attn.qkv_proj.bias": short(expected)}


def test_the_experts_of_a_layer_are_two_tensors() -> None:
    """Gate over up, expert after expert, in whatever order they come; each rank's width is filled up to a multiple of 32."""
    gates, ups, downs = torch.randn(3, 40, 6), torch.randn(3, 40, 6), torch.randn(3, 6, 40)
    fused = FusedChecksums(2)
    layer = "model.layers.1.mlp.experts."
    for expert in (1, 0, 2):
        for part, matrices in (("down", downs), ("up", ups), ("gate", gates)):
            fused.add(f"{layer}{expert}.{part}_proj.weight", matrices[expert])
    wide = torch.zeros(3, 2, 64, 6)
    wide[:, 0, :40], wide[:, 1, :40] = gates, ups
    narrow = torch.zeros(3, 6, 64)
    narrow[:, :, :40] = downs
    for rank in (0, 1):
        own = slice(32 * rank, 32 * rank + 32)
        assert fused.of_rank(rank) == {
            f"{layer}w13_weight": short(wide[:, :, own]), f"{layer}w2_weight": short(narrow[:, :, own])
        }  # fmt: skip


def test_an_expert_that_did_not_come_is_no_checksum() -> None:
    fused = FusedChecksums(1)
    fused.add("model.layers.1.mlp.experts.1.down_proj.weight", torch.ones(2, 2))
    with pytest.raises(AssertionError, match="piece 0 is missing"):
        fused.of_rank(0)
