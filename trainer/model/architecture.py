"""What a Hugging Face config.json says about a Qwen3, Qwen2, Llama or Qwen3-MoE model, checked once. First step of
building the learner's model.

A field that this model cannot honour is an error that names it; nothing is ignored in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from rlagent.errors import LoadError

FAMILIES: Final = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
UNSUPPORTED_FLAGS: Final = ("attention_bias", "mlp_bias", "use_sliding_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of some layers' feed-forward: softmax over all experts, then the best top_k; with
    `normalized` their gates are scaled to sum to 1.
    """

    count: int
    top_k: int
    ffn_size: int
    normalized: bool
    layers: tuple[int, ...]  # those that have experts, ascending; the others are dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder: shapes and the few switches in which the families differ."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int  # key/value heads
    head_size: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    experts: Experts | None = None

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_groups

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    def inverse_frequencies(self) -> torch.Tensor:
        """Rotary inverse frequencies [head_size / 2], fp32, in transformers' own order of operations (so to the last
        bit).
        """
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.int64).float() / self.head_size
        plain = 1.0 / (self.rope_theta**exponents)
        if self.rope_scaling is None:
            return plain
        scaling = self.rope_scaling
        wavelength = 2 * math.pi / plain
        longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
        shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
        stretched = torch.where(wavelength > longest, plain / scaling.factor, plain)
        smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = (1 - smooth) * stretched / scaling.factor + smooth * stretched
        between = ~(wavelength < shortest) & ~(wavelength > longest)
        return torch.where(between, blend, stretched)


def read_config(model_dir: Path) -> dict[str, Any]:
    """The parsed config.json of a model directory."""
    path = model_dir / "config.json"
    try:
        parsed = json.loads(path.read_text())
    except FileNotFoundError:
        raise LoadError(f"{model_dir} is not a model directory: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise LoadError(f"{path} does not hold a JSON object")
    return parsed


def _rope(config: Mapping[str, Any], path: Path) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling; transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling."""
    parameters = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise LoadError(f"{path}: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise LoadError(f"{path}: rope type {kind!r} is not supported; use 'default' or 'llama3'")
    return theta, Llama3Scaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )


def _experts(config: Mapping[str, Any], path: Path) -> Experts | None:
    """Which layers are a mixture, as transformers' Qwen3MoeDecoderLayer decides it; None where none is."""
    count = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step", 1))
    layers = tuple(n for n in range(int(config["num_hidden_layers"])) if n not in dense and not (n + 1) % step)
    if not count or not layers:
        return None
    top_k = int(config["num_experts_per_tok"])
    if not 1 <= top_k <= count:
        raise LoadError(f"{path}: num_experts_per_tok = {top_k} is not between 1 and num_experts = {count}")
    normalized = bool(config.get("norm_topk_prob", False))
    if normalized and top_k == 1:
        raise LoadError(
            f"{path}: norm_topk_prob with num_experts_per_tok = 1 makes gates of 1, which learn nothing: not supported"
        )
    return Experts(
        count=count,
        top_k=top_k,
        ffn_size=int(config["moe_intermediate_size"]),
        normalized=normalized,
        layers=layers,
    )


def read_architecture(model_dir: Path) -> Architecture:
    """Parse and check config.json. Raises LoadError with the field at fault."""
    config = read_config(model_dir)
    path = model_dir / "config.json"
    family = config.get("model_type")
    if family not in FAMILIES:
        raise LoadError(f"{path}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    for flag in UNSUPPORTED_FLAGS:
        if config.get(flag):
            raise LoadError(f"{path}: {flag} = {config[flag]!r} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{path}: hidden_act {config['hidden_act']!r} is not supported; it must be 'silu'")
    try:
        heads = int(config["num_attention_heads"])
        theta, scaling = _rope(config, path)
        return Architecture(
            family=str(family),
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            num_heads=heads,
            num_groups=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
            ffn_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config.get("max_position_embeddings") or 2048),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            rope_theta=theta,
            rope_scaling=scaling,
            experts=_experts(config, path) if family == "qwen3_moe" else None,
        )
    except KeyError as error:
        raise LoadError(f"{path}: the field {error.args[0]!r} is missing") from error
