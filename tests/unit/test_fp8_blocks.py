"""Float8 blocks: the bound of their rounding, transformers' own for the same weights, and which weights they hold."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from rlagent.errors import LoadError
from rlagent.fp8 import Fp8Blocks, stored
from rlagent.kernels.quantize import FLOAT8, dequantize_blocks, num_blocks, quantize_blocks

BLOCK = (128, 128)
SAID: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


class Quantizer:
    """What transformers' operations ask of their quantizer."""

    quantization_config = FineGrainedFP8Config(weight_block_size=BLOCK)


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    spread=st.floats(-20, 20), seed=st.integers(0, 99),
)  # fmt: skip
def test_what_rounding_costs_is_bounded(
    rows: int, columns: int, block: tuple[int, int], spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.exp(
        torch.randn(rows, columns, generator=generator) * abs(spread) / 10 + spread
    )
    quantized, scale_inv = quantize_blocks(weight, block)
    assert (quantized.shape, quantized.dtype, scale_inv.dtype) == (weight.shape, FLOAT8, torch.float32)
    assert scale_inv.shape == num_blocks(weight.shape, block)
    found = dequantize_blocks(quantized, scale_inv, block)
    of_each = scale_inv.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    bound = torch.maximum(weight.abs() / 16, of_each * 2**-10)
    assert ((found - weight).abs() <= bound * (1 + 1e-5)).all()
    again = dequantize_blocks(*quantize_blocks(found, block), block)
    torch.testing.assert_close(again, found, rtol=1e-6, atol=0)


def test_a_block_of_zeros_is_zero() -> None:
    weight = torch.zeros(130, 5)
    weight[129] = 3.0
    quantized, scale_inv = quantize_blocks(weight, BLOCK)
    assert scale_inv[0, 0] == 1
    torch.testing.assert_close(dequantize_blocks(quantized, scale_inv, BLOCK), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_bit_for_bit_what_transformers_makes(dtype: torch.dtype) -> None:
    weight = (0.02 * torch.randn(256, 384, generator=torch.Generator().manual_seed(2))).to(dtype)
    name = "model.layers.0.mlp.up_proj.weight"
    theirs = Fp8Quantize(Quantizer()).convert({name: weight})
    ours = dict(Fp8Blocks(block=BLOCK).store(name, weight))
    assert list(ours) == list(theirs) == [name, "model.layers.0.mlp.up_proj.weight_scale_inv"]
    for each, tensor in theirs.items():
        assert (ours[each].shape, ours[each].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(ours[each].view(torch.uint8), tensor.view(torch.uint8))
    whole = Fp8Dequantize(Quantizer())._dequantize_one(*theirs.values(), torch.float32)
    assert torch.equal(dequantize_blocks(ours[name], ours[f"{name}_scale_inv"], BLOCK), whole)


def test_linear_weights_of_layers_are_held_and_nothing_else() -> None:
    fp8 = Fp8Blocks.of({"quantization_config": SAID | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}})
    assert fp8 is not None
    held = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.3.down_proj")
    kept = ("self_attn.q_norm", "input_layernorm", "mlp.gate")
    assert all(fp8.holds(f"model.layers.0.{name}.weight") for name in held)
    assert not any(fp8.holds(f"model.layers.0.{name}.weight") for name in kept)
    assert not any(fp8.holds(name) for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"))
    assert not fp8.holds("model.layers.0.self_attn.q_proj.bias")
    assert not fp8.holds("model.layers.1.mlp.up_proj.weight")
    assert fp8.holds("model.layers.11.mlp.up_proj.weight")


def test_what_is_not_held_takes_the_engines_dtype() -> None:
    weights = [("model.norm.weight", torch.ones(4)), ("model.layers.0.mlp.up_proj.weight", torch.ones(4, 4))]
    found = dict(stored(Fp8Blocks(block=BLOCK), weights, torch.bfloat16))
    assert [tensor.dtype for tensor in found.values()] == [torch.bfloat16, FLOAT8, torch.float32]
    assert [name for name, _ in stored(None, weights)] == [name for name, _ in weights]


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "awq"}, {"weight_block_size": None}, {"activation_scheme": "static"}, {"scale_fmt": "ue8m0"}],
)
def test_another_quantisation_is_refused_by_name(change: dict[str, Any]) -> None:
    assert Fp8Blocks.of({}) is None
    with pytest.raises(LoadError, match=str(next(iter(change.values())))):
        Fp8Blocks.of({"quantization_config": SAID | change})


def test_factors_of_another_shape_are_refused() -> None:
    fp8 = Fp8Blocks(block=BLOCK)
    with pytest.raises(LoadError, match=r"'a' is torch.float8_e4m3fn with factors \(2, 1\)"):
        fp8.whole("a", torch.zeros(4, 4).to(FLOAT8), torch.ones(2, 1))
    with pytest.raises(LoadError, match=r"'a' is torch\.float32"):
        fp8.whole("a", torch.zeros(4, 4), torch.ones(1, 1))
