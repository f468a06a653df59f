"""Which Hugging Face tensors make up each Megatron parameter, and how tensor parallelism cuts it. Pure; used by
loading, export and sync.

Invariant: join(split(x)) is x, bit for bit, for every kind and every tensor-parallel size. Megatron fuses q, k and v
group by group (the query heads of a group, then its key, then its value) and gate over up, each rank holding its
part of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from rlagent.trainer.model.architecture import Architecture
from rlagent.trainer.model.build import padded_vocab

Kind = Literal["vocab", "replicated", "qkv", "columns", "gate_up"]
Place = Literal["embedding", "layer", "norm", "head"]
LOCAL_EXPERT: Final = "{expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One Megatron parameter. `local` are its possible names inside its stage (the local spec's, then Transformer
    Engine's); in a layer they are relative to it, and of an expert they hold LOCAL_EXPERT, its number on its rank. `hf` are
    the full tensors it is made of, in order.
    """

    local: tuple[str, ...]
    hf: tuple[str, ...]
    kind: Kind
    place: Place
    layer: int = -1
    expert: int = -1  # of an expert's own parameter: experts are dealt out whole, tensor parallelism does not cut them

    def cuts(self, tensor: int) -> int:
        """Into how many different parts `tensor` tensor-parallel ranks cut it."""
        return 1 if self.expert >= 0 or self.kind == "replicated" else tensor


def _layer_rules(arch: Architecture, layer: int) -> list[Rule]:
    prefix = f"model.layers.{layer}."
    qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]

    def rule(kind: Kind, local: tuple[str, ...], *hf: str, expert: int = -1) -> Rule:
        return Rule(local=local, hf=hf, kind=kind, place="layer", layer=layer, expert=expert)

    rules = [
        rule(
            "replicated",
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            f"{prefix}input_layernorm.weight",
        ),
        rule("qkv", ("self_attention.linear_qkv.weight",), *(f"{name}.weight" for name in qkv)),
    ]
    if arch.qkv_bias:
        rules.append(rule("qkv", ("self_attention.linear_qkv.bias",), *(f"{name}.bias" for name in qkv)))
    if arch.qk_norm:
        rules += [
            rule("replicated", (f"self_attention.{part}_layernorm.weight",), f"{prefix}self_attn.{part}_norm.weight")
            for part in "qk"
        ]
    rules += [
        rule("columns", ("self_attention.linear_proj.weight",), f"{prefix}self_attn.o_proj.weight"),
        rule(
            "replicated",
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            f"{prefix}post_attention_layernorm.weight",
        ),
    ]
    blocks = [("mlp.", "mlp.", -1)]
    if arch.experts is not None and arch.has_experts(layer):
        rules.append(rule("replicated", ("mlp.router.weight",), f"{prefix}mlp.gate.weight"))
        local = f"mlp.experts.local_experts.{LOCAL_EXPERT}."
        blocks = [(local, f"mlp.experts.{expert}.", expert) for expert in range(arch.experts.count)]
    for local, block, expert in blocks:
        gate_up = [f"{prefix}{block}{part}_proj.weight" for part in ("gate", "up")]
        rules.append(rule("gate_up", (f"{local}linear_fc1.weight",), *gate_up, expert=expert))
        rules.append(rule("columns", (f"{local}linear_fc2.weight",), f"{prefix}{block}down_proj.weight", expert=expert))
    return rules


def rules(arch: Architecture) -> list[Rule]:
    """Every parameter of the whole model, in a fixed order. Tied embeddings have no head of their own."""
    found = [
        Rule(
            local=("embedding.word_embeddings.weight",),
            hf=("model.embed_tokens.weight",),
            kind="vocab",
            place="embedding",
        )
    ]
    for layer in range(arch.num_layers):
        found += _layer_rules(arch, layer)
    found.append(
        Rule(local=("decoder.final_layernorm.weight",), hf=("model.norm.weight",), kind="replicated", place="norm")
    )
    if not arch.tied:
        found.append(Rule(local=("output_layer.weight",), hf=("lm_head.weight",), kind="vocab", place="head"))
    return found


def renamed(rule: Rule, prefix: str) -> Rule:
    """The rule of the same parameter of another model, whose tensors have names of their own."""
    return replace(rule, hf=tuple(f"{prefix}{name}" for name in rule.hf))


def shapes(arch: Architecture, rule: Rule) -> list[tuple[int, ...]]:
    """The shapes of the rule's Hugging Face tensors."""
    hidden, heads = arch.hidden_size, (arch.num_heads, arch.num_groups, arch.num_groups)
    if rule.kind == "vocab":
        return [(arch.vocab_size, hidden)]
    if rule.kind == "qkv":
        tail = () if rule.hf[0].endswith("bias") else (hidden,)
        return [(count * arch.head_size, *tail) for count in heads]
    ffn = arch.experts.ffn_size if rule.expert >= 0 and arch.experts is not None else arch.ffn_size
    if rule.kind == "gate_up":
        return [(ffn, hidden)] * 2
    if rule.kind == "columns":
        attention = rule.hf[0].endswith("o_proj.weight")
        return [(hidden, arch.num_heads * arch.head_size if attention else ffn)]
    if arch.experts is not None and rule.hf[0].endswith("mlp.gate.weight"):
        return [(arch.experts.count, hidden)]
    return [(arch.head_size if "self_attn." in rule.hf[0] else hidden,)]


def _groups(arch: Architecture, tensor: Tensor) -> Tensor:
    return tensor.reshape(arch.num_groups, -1, *tensor.shape[1:])


def split(arch: Architecture, rule: Rule, tensors: Sequence[Tensor], *, size: int, rank: int) -> Tensor:
    """The Hugging Face tensors of a rule -> the parameter of tensor-parallel rank `rank` of `size`."""
    size, rank = rule.cuts(size), rank % rule.cuts(size)
    if rule.kind == "replicated":
        return tensors[0]
    if rule.kind == "vocab":
        missing = padded_vocab(arch.vocab_size, size) - arch.vocab_size
        whole = torch.cat((tensors[0], tensors[0].new_zeros(missing, arch.hidden_size))) if missing else tensors[0]
        return whole.chunk(size)[rank]
    if rule.kind == "columns":
        return tensors[0].chunk(size, dim=1)[rank]
    if rule.kind == "gate_up":
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
    merged = torch.cat([_groups(arch, tensor) for tensor in tensors], dim=1)
    return merged.chunk(size)[rank].flatten(0, 1)


def join(arch: Architecture, rule: Rule, shards: Sequence[Tensor]) -> list[Tensor]:
    """All tensor-parallel ranks' parameters of a rule -> its Hugging Face tensors."""
    shards = shards[: rule.cuts(len(shards))]
    if rule.kind == "replicated":
        return [shards[0]]
    if rule.kind == "vocab":
        return [torch.cat(tuple(shards))[: arch.vocab_size]]
    if rule.kind == "columns":
        return [torch.cat(tuple(shards), dim=1)]
    if rule.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in (0, 1)]
    merged = torch.cat([shard.reshape(arch.num_groups // len(shards), -1, *shard.shape[1:]) for shard in shards])
    sizes = [arch.heads_per_group * arch.head_size, arch.head_size, arch.head_size]
    return [part.flatten(0, 1) for part in torch.split(merged, sizes, dim=1)]
