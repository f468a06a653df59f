"""Builds the learner's GPTModel for one rank from an Architecture. Its output is hidden states: the head runs in
`linear_logprob`.

Invariant: the same Architecture gives the same function of tokens on every layout; layouts only cut it.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from rlagent.errors import LearnerError
from rlagent.trainer.config import ParallelConfig
from rlagent.trainer.model.architecture import Architecture
from rlagent.trainer.model.attention import PackedAttention
from rlagent.trainer.model.megatron import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from rlagent.trainer.model.norm import RMSNorm
from rlagent.trainer.model.replay import ReplayedRouting, RoutedLayer
from rlagent.trainer.model.swiglu import SwiGlu


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage answers hidden states [t, 1, H], so that logits of a whole batch never exist."""

    architecture: Architecture
    value_head: Tensor  # [H], of a critic's last stage only

    def _postprocess(self, hidden_states: Tensor, **_: object) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """This rank's shard [V / tensor, H] of the output matrix; on the last stage only."""
        weight: Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return weight


class Interleaved(nn.Module):
    """The chunks of layers that a rank runs under the interleaved pipeline schedule, shallowest first. The last rank's last
    one has the head, the first rank's first one the embedding.
    """

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.config: Any = chunks[0].config


Policy: TypeAlias = PolicyModel | Interleaved
"""One rank's part of a model."""


def chunks_of(model: Any) -> list[Any]:
    """What megatron's schedules call its model chunks: of a Policy, or of what `optimizer.data_parallel` made of one."""
    return list(getattr(model, "chunks", [model]))


def _leave(_: Tensor) -> None:
    """An initialisation that does nothing."""


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """The vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor) * tensor


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Layers of each pipeline stage; earlier stages take the remainder, as the last one also has the head.

    >>> stage_layers(3, 2)
    [range(0, 2), range(2, 3)]
    """
    base, extra = divmod(num_layers, stages)
    starts = [stage * base + min(stage, extra) for stage in range(stages + 1)]
    return [range(first, last) for first, last in itertools.pairwise(starts)]


def check_layout(arch: Architecture, parallel: ParallelConfig) -> None:
    """Raise LearnerError where the model cannot be cut so."""
    for name, count in (
        ("attention heads", arch.num_heads),
        ("key/value heads", arch.num_groups),
        ("ffn size", arch.ffn_size),
    ):
        if count % parallel.tensor:
            raise LearnerError(
                f"parallel.tensor = {parallel.tensor} does not divide the model's {count} {name}; choose a divisor"
            )
    if arch.num_layers < parallel.pipeline:
        raise LearnerError(f"parallel.pipeline = {parallel.pipeline} is more than the model's {arch.num_layers} layers")
    if arch.num_layers < parallel.pipeline * parallel.virtual_pipeline:
        raise LearnerError(
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline} chunks of {parallel.pipeline} stages are more than the "
            f"model's {arch.num_layers} layers"
        )
    if arch.experts is None:
        if parallel.expert != 1:
            raise LearnerError(f"parallel.expert = {parallel.expert}: the model is dense; set it to 1")
    elif arch.experts.count % parallel.expert:
        raise LearnerError(
            f"parallel.expert = {parallel.expert} does not divide the model's {arch.experts.count} experts; choose a divisor"
        )
    elif parallel.tensor > 1 and not parallel.sequence:
        raise LearnerError(
            f"parallel.tensor = {parallel.tensor} of a model with experts needs parallel.sequence = true, so that each rank "
            "routes tokens of its own"
        )


def _has_te() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def transformer_config(
    arch: Architecture, parallel: ParallelConfig, *, dtype: torch.dtype, recompute: bool, cuda: bool, te: bool
) -> Any:
    """Megatron's own settings. Every fusion that needs Transformer Engine or Apex is off."""
    return TransformerConfig(
        **_shape(arch),
        **_experts(arch),
        **_cut(arch, parallel),
        use_te_activation_func=arch.experts is None and not te,  # megatron's name for one that a layer spec gives
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cuda,
        # A checkpoint sets the weights, but only an initialised parameter is marked as cut, for gradient norms.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        cuda_graph_scope=[],
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _shape(arch: Architecture) -> dict[str, Any]:
    """What the checkpoint's config.json says of its layers."""
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_groups,
        "kv_channels": arch.head_size,
        "ffn_hidden_size": arch.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
    }


def _experts(arch: Architecture) -> dict[str, Any]:
    experts = arch.experts
    return {
        "moe_token_dispatcher_type": "alltoall",  # a dense model has none; variable_seq_lengths asks for it
        "num_moe_experts": experts.count if experts else None,
        "moe_ffn_hidden_size": experts.ffn_size if experts else None,
        "moe_router_topk": experts.top_k if experts else 2,
        # Softmax over all experts, then the best; or, the same as that scaled to sum to 1, softmax over the best.
        "moe_router_pre_softmax": experts is not None and not experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _cut(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """How the layers, and what is in them, are spread over ranks."""
    interleaved = parallel.virtual_pipeline > 1
    parts = stage_layers(arch.num_layers, parallel.pipeline * parallel.virtual_pipeline)
    layout = [["decoder"] * len(layers) for layers in parts]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "pipeline_model_parallel_layout": layout if parallel.pipeline > 1 else None,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        "variable_seq_lengths": parallel.pipeline > 1,
        # Batched sends and receives of neighbouring chunks mix up on gloo.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
    }


def layer_spec(arch: Architecture, *, te: bool, experts: bool = False) -> tuple[Any, Any]:
    """A layer's spec, dense or with experts, and the final norm: Transformer Engine's (te), or megatron's local one
    with our norm.
    """
    options: dict[str, Any] = {"qk_layernorm": arch.qk_norm}
    if experts:
        assert arch.experts is not None
        options |= {"num_experts": arch.experts.count, "moe_grouped_gemm": False}
    if te:
        from megatron.core.extensions.transformer_engine import TENorm

        spec = get_gpt_layer_with_transformer_engine_spec(**options)
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        if experts:
            spec.module = RoutedLayer
        else:
            spec.submodules.mlp.params["ffn_hidden_size"] = arch.ffn_size
        return spec, TENorm
    spec = get_gpt_layer_local_spec(**options, normalization="RMSNorm")
    if experts:
        spec.module = RoutedLayer
    else:
        spec.submodules.mlp.params["ffn_hidden_size"] = arch.ffn_size
    if arch.experts is None:
        spec.submodules.mlp.submodules.activation_func = SwiGlu
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec, RMSNorm


def build_model(
    arch: Architecture,
    parallel: ParallelConfig,
    *,
    stage: int,
    dtype: torch.dtype,
    recompute: bool = False,
    cuda: bool = False,
    te: bool = True,
) -> Policy:
    """This rank's part of the model, its weights not yet set. The process groups must exist
    (`rlagent.trainer.parallel`). te: its layers are Transformer Engine's where that is installed beside a GPU.
    """
    check_layout(arch, parallel)
    te = te and cuda and _has_te()
    config = transformer_config(arch, parallel, dtype=dtype, recompute=recompute, cuda=cuda, te=te)
    dense, final_norm = layer_spec(arch, te=te)
    mixture = layer_spec(arch, te=te, experts=True)[0] if arch.experts else dense
    num_chunks = parallel.virtual_pipeline
    parts = stage_layers(arch.num_layers, parallel.pipeline * num_chunks)
    chunks = []
    for number in range(num_chunks):
        part = number * parallel.pipeline + stage
        layers = parts[part]
        model = PolicyModel(
            config,
            TransformerBlockSubmodules(
                layer_specs=[mixture if arch.has_experts(layer) else dense for layer in layers], layer_norm=final_norm
            ),
            vocab_size=padded_vocab(arch.vocab_size, parallel.tensor),
            max_sequence_length=arch.max_positions,
            pre_process=part == 0,
            post_process=part == len(parts) - 1,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="none",
            vp_stage=number if num_chunks > 1 else None,
        )
        _complete(model, arch, layers)
        chunks.append(model.cuda() if cuda else model)
    return Interleaved(chunks) if num_chunks > 1 else chunks[0]


def _complete(model: PolicyModel, arch: Architecture, layers: range) -> None:
    """What megatron does not set by itself."""
    model.architecture = arch
    for number, layer in zip(layers, model.decoder.layers, strict=True):
        if arch.has_experts(number):
            layer.mlp.router.router_replay = ReplayedRouting(number)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Megatron sums its gradient over the ranks that hold the same expert, also where those are tensor-parallel ranks.
            parameter.allreduce = False
