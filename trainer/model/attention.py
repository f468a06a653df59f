"""Causal attention over packed rows, with the rotary embedding, as megatron-core's `core_attention`.

Megatron's local attention refuses packed rows, and its rotary code loops over them in Python in every layer; here
both use tables made once a microbatch (`PackedRows`). On GPUs flash-attn's varlen kernel is used where installed;
else torch's SDPA runs on padded buckets.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from rlagent.trainer.model.megatron import MegatronModule, parallel_state
from rlagent.trainer.model.packing import PackedRows, Segment, chunks
from rlagent.trainer.model.rows import gather_rows, scatter_rows


class _Rotate(torch.autograd.Function):
    """x [t, n, d] -> x * cos + rotate_half(x) * sin; the gradient is the rotation by the opposite angle, so nothing
    of x is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _GatherStream(torch.autograd.Function):
    """A rank's tokens [t, ...] to the whole stream [t * c, ...] in order; gradients of all ranks are summed on the
    way back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        stream = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        for rank, part in enumerate(parts):
            local = 0
            for start, end in chunks(stream.shape[0], group.size(), rank):
                stream[start:end] = part[local : local + end - start]
                local += end - start
        return stream

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        own = chunks(grad.shape[0], ctx.group.size(), ctx.group.rank())
        return torch.cat([grad[start:end] for start, end in own]), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Any = None) -> Tensor:
    """[b, t, n, d] -> [b, t, n, d]; causal unless a mask is given."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def bucketed_attention(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """query [t, n, d], key and value [t, g, d] -> [t, n, d], one SDPA call for each bucket."""
    assert rows.padded is not None
    padded = [scatter_rows(x, rows.padded) for x in (query, key, value)]
    outs = []
    for bucket in rows.buckets:
        end = bucket.start + bucket.rows * bucket.length
        q, k, v = (x[bucket.start : end].view(bucket.rows, bucket.length, *x.shape[1:]) for x in padded)
        outs.append(_attend(q, k, v, scale).flatten(0, 1))
    return gather_rows(torch.cat(outs), rows.padded.first)


def segment_attention(query: Tensor, key: Tensor, value: Tensor, parts: tuple[Segment, ...], scale: float) -> Tensor:
    """query [t, n, d] of this rank, key and value [T, g, d] of the whole stream -> [t, n, d]."""
    outs = []
    for part in parts:
        q = query[None, part.query_start : part.query_end]
        k, v = (x[None, part.key_start : part.key_end] for x in (key, value))
        outs.append(_attend(q, k, v, scale, causal_lower_right(q.shape[1], k.shape[1]))[0])
    return torch.cat(outs)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Takes what megatron-core gives to the core attention of a layer spec; query [t, n, d], key and value [t, g, d]
    before rotation.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        del layer_number, attn_mask_type, attention_type, attention_dropout, cp_comm_type
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.context_group = (
            pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()
        )
        self.has_flash = importlib.util.find_spec("flash_attn") is not None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """-> [t, 1, n * d]."""
        del attention_mask, attn_mask_type, attention_bias
        rows = packed_seq_params
        assert rows is not None, "the learner always packs"
        query = _Rotate.apply(query, rows.cos, rows.sin)  # type: ignore[no-untyped-call]
        key = _Rotate.apply(key, rows.cos, rows.sin)  # type: ignore[no-untyped-call]
        if self.context_group.size() > 1:
            key = _GatherStream.apply(key, self.context_group)  # type: ignore[no-untyped-call]
            value = _GatherStream.apply(value, self.context_group)  # type: ignore[no-untyped-call]
            out = segment_attention(query, key, value, rows.segments, self.scale)
        elif self.has_flash and query.is_cuda and query.dtype != torch.float32:
            out = self._flash(query, key, value, rows)
        else:
            out = bucketed_attention(query, key, value, rows, self.scale)
        return out.reshape(out.shape[0], 1, -1)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        cu, longest = rows.cu_seqlens_q, rows.max_seqlen_q
        if rows.whole is not None:
            query, key, value = (scatter_rows(x, rows.whole) for x in (query, key, value))
        out: Tensor = flash_attn_varlen_func(
            query, key, value, cu, cu, longest, longest, softmax_scale=self.scale, causal=True
        )
        return out if rows.whole is None else gather_rows(out, rows.whole.first)
