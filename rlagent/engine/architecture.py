"""What the engine needs to know of a Hugging Face config.json: the Llama family (Llama, Qwen2, Qwen3), and Qwen3-MoE."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from rlagent.errors import LoadError
from rlagent.fp8 import Fp8Blocks

FAMILIES: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: its size, how many each token is given, and in which layers it stands."""

    count: int
    top_k: int
    intermediate: int
    normalized: bool  # gates are scaled to sum to 1
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes and constants of a decoder."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    context: int  # longest sequence, in tokens
    rope: dict[str, Any]
    eos_ids: tuple[int, ...]
    experts: Experts | None = None
    fp8: Fp8Blocks | None = None  # which weights a checkpoint and a push store in float8

    @classmethod
    def load(cls, model_dir: Path) -> "Architecture":
        """Read a model directory's config.json. LoadError names the directory or the unsupported setting."""
        path = model_dir / "config.json"
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise LoadError(f"model directory {str(model_dir)!r} has no readable config.json; check --model") from error
        except ValueError as error:
            raise LoadError(f"{path} is not valid JSON: {error}") from error
        family = (config.get("architectures") or ["?"])[0]
        if family not in FAMILIES:
            raise LoadError(
                f"{path}: architecture {family!r} is not one the embedded engine runs ({', '.join(FAMILIES)})"
            )
        if config.get("use_sliding_window"):
            raise LoadError(f"{path}: use_sliding_window is not supported by the embedded engine")
        if config.get("hidden_act", "silu") != "silu":
            raise LoadError(
                f"{path}: hidden_act {config['hidden_act']!r} is not supported by the embedded engine (silu)"
            )
        try:
            return cls._parse(family, config, model_dir)
        except LoadError as error:
            raise LoadError(f"{path}: {error}") from error
        except KeyError as error:
            raise LoadError(f"{path}: {error.args[0]} is missing") from error

    @classmethod
    def _parse(cls, family: str, config: dict[str, Any], model_dir: Path) -> "Architecture":
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=family == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
            qk_norm=family.startswith("Qwen3"),
            context=config["max_position_embeddings"],
            rope=_rope(config),
            eos_ids=_eos_ids(model_dir, config),
            experts=_experts(config) if family == "Qwen3MoeForCausalLM" else None,
            fp8=Fp8Blocks.of(config),
        )

    @property
    def query_size(self) -> int:
        """Width of the queries, all heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values), all heads together."""
        return self.num_kv_heads * self.head_dim


def inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """RoPE inverse frequencies [head_dim / 2] f32, plain or with Llama 3's scaling (Llama 3.1 release, `llama3` in HF)."""
    rope, dim = architecture.rope, architecture.head_dim
    inverse: torch.Tensor = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope["rope_type"] == "default":
        return inverse
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(medium, blended, scaled)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, older releases `rope_theta` and `rope_scaling`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise LoadError(f"rope type {kind!r} is not supported by the embedded engine (default, llama3)")
    return {"rope_theta": config.get("rope_theta", 10000.0), **scaling, "rope_type": kind}


def _experts(config: dict[str, Any]) -> Experts | None:
    """Which layers are a mixture, as transformers' Qwen3MoeDecoderLayer decides it; None where none is."""
    dense = config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step", 1)
    layers = tuple(n for n in range(config["num_hidden_layers"]) if n not in dense and not (n + 1) % step)
    count = config.get("num_experts") or config.get("num_local_experts") or 0
    if not count or not layers:
        return None
    return Experts(
        count=count,
        top_k=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=layers,
    )


def _eos_ids(model_dir: Path, config: dict[str, Any]) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)
