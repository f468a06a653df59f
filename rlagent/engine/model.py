"""The forward pass: a decoder (Llama, Qwen2, Qwen3, Qwen3-MoE) over a flat list of tokens and a KV cache by rows.

In the flow: scheduler -> (tokens, positions, where each belongs) -> logits of the last token of each sequence. Projections are fused
(qkv, gate and up); `parameters_by_name` views them under their Hugging Face names, so that loading and checksums stay by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rlagent.engine.architecture import Architecture, inverse_frequencies
from rlagent.engine.cache import KVCache, StepPlan
from rlagent.engine.experts import ExpertLayer
from rlagent.engine.float8 import Float8Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, end) of the sequence in cache row `row`, computed in this forward."""

    row: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights. qkv is [q + 2 kv, hidden], gate_up [2 intermediate, hidden]; with experts, gate_up and down
    are theirs.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: each head's scale, so that one norm serves both
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    experts: ExpertLayer | None


class Model:
    """Weights and forward. All weights have one dtype and device."""

    def __init__(self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = a = architecture
        self.dtype, self.device = dtype, device

        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.embedding = empty(a.vocab_size, a.hidden)
        self.head = self.embedding if a.tied else empty(a.vocab_size, a.hidden)
        self.final_norm = empty(a.hidden)

        def feed_forward(index: int) -> tuple[torch.Tensor, torch.Tensor, ExpertLayer | None]:
            e = a.experts
            if e is None or index not in e.layers:
                return empty(2 * a.intermediate, a.hidden), empty(a.hidden, a.intermediate), None
            gate_up, down = empty(e.count, 2 * e.intermediate, a.hidden), empty(e.count, a.hidden, e.intermediate)
            return gate_up, down, ExpertLayer(e, empty(e.count, a.hidden), gate_up, down)

        self.layers = [
            Layer(
                input_norm=empty(a.hidden),
                qkv=empty(a.query_size + 2 * a.kv_size, a.hidden),
                qkv_bias=empty(a.query_size + 2 * a.kv_size) if a.qkv_bias else None,
                qk_norm=empty(a.num_heads + a.num_kv_heads, a.head_dim) if a.qk_norm else None,
                q_norm=empty(a.head_dim) if a.qk_norm else None,
                k_norm=empty(a.head_dim) if a.qk_norm else None,
                output=empty(a.hidden, a.query_size),
                post_norm=empty(a.hidden),
                gate_up=gate_up,
                down=down,
                experts=experts,
            )
            for gate_up, down, experts in map(feed_forward, range(a.num_layers))
        ]
        self._float8 = Float8Weights(a.fp8, self.parameters_by_name()) if a.fp8 is not None else None
        angles = torch.outer(torch.arange(a.context, dtype=torch.float32), inverse_frequencies(a))
        self._cos = torch.cat((angles, angles), -1).cos().to(device=device, dtype=dtype)
        self._sin = torch.cat((-angles.sin(), angles.sin()), -1).to(device=device, dtype=dtype)
        self._scale = a.head_dim**-0.5
        self._eps = torch.tensor(a.norm_eps)
        self._means: dict[int, torch.Tensor] | None = None  # a column that takes the mean of so many
        if self.device.type == "cpu" and dtype == torch.float32:
            self._means = {n: torch.full((n, 1), 1 / n) for n in (a.hidden, a.head_dim)}

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        """Views of all weights under their Hugging Face names, in checkpoint order."""
        a = self.architecture
        named = {"model.embed_tokens.weight": self.embedding}
        for index, layer in enumerate(self.layers):
            at = f"model.layers.{index}"
            named[f"{at}.input_layernorm.weight"] = layer.input_norm
            q, k, v = layer.qkv.split((a.query_size, a.kv_size, a.kv_size))
            named |= {f"{at}.self_attn.{n}_proj.weight": w for n, w in (("q", q), ("k", k), ("v", v))}
            if layer.qkv_bias is not None:
                q, k, v = layer.qkv_bias.split((a.query_size, a.kv_size, a.kv_size))
                named |= {f"{at}.self_attn.{n}_proj.bias": w for n, w in (("q", q), ("k", k), ("v", v))}
            if layer.q_norm is not None and layer.k_norm is not None:
                named[f"{at}.self_attn.q_norm.weight"] = layer.q_norm
                named[f"{at}.self_attn.k_norm.weight"] = layer.k_norm
            named[f"{at}.self_attn.o_proj.weight"] = layer.output
            named[f"{at}.post_attention_layernorm.weight"] = layer.post_norm
            if layer.experts is not None:
                named |= layer.experts.parameters_by_name(f"{at}.mlp")
                continue
            gate, up = layer.gate_up.chunk(2)
            named[f"{at}.mlp.gate_proj.weight"], named[f"{at}.mlp.up_proj.weight"] = gate, up
            named[f"{at}.mlp.down_proj.weight"] = layer.down
        named["model.norm.weight"] = self.final_norm
        if not a.tied:
            named["lm_head.weight"] = self.head
        return named

    def stored_by_name(self) -> dict[str, torch.Tensor]:
        """What a checkpoint of this model holds: its weights; in place of one in float8 blocks those, and their factors beside them."""
        stored = {} if self._float8 is None else self._float8.stored
        return self.parameters_by_name() | stored

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy stored weights in by name; names, shapes and float8 were checked by the caller."""
        named = self.parameters_by_name()
        for name, weight in (weights if self._float8 is None else self._float8.take(weights)).items():
            named[name].copy_(weight)
        a = self.architecture
        for layer in self.layers:
            if layer.qk_norm is not None and layer.q_norm is not None and layer.k_norm is not None:
                layer.qk_norm[: a.num_heads] = layer.q_norm
                layer.qk_norm[a.num_heads :] = layer.k_norm

    @torch.inference_mode()
    def forward(
        self, tokens: Sequence[int], cache: KVCache, prefill: Sequence[Chunk], decode: Sequence[tuple[int, int]],
        last: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        """Logits [len(last), vocab] f32 at the flat indices `last`.

        tokens: first those of the prefill chunks, one after the other, then one of each decode (row, position), in ascending rows.
        Keys and values of all of them are written to the cache.
        """
        a = self.architecture
        starts, decode_start = [], 0
        for chunk in prefill:
            starts.append((decode_start, chunk))
            decode_start += len(chunk)
        layout = torch.tensor((tokens, *_layout(prefill, decode)), device=self.device)  # one transfer
        ids, rows, positions = layout.unbind()
        step = cache.plan(rows, positions, [row for row, _ in decode], [position + 1 for _, position in decode])
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        x = self.embedding[ids]
        for index, layer in enumerate(self.layers):
            normed = self._rms_norm(x, layer.input_norm)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(tokens), -1, a.head_dim)
            qk, value = qkv.split((a.num_heads + a.num_kv_heads, a.num_kv_heads), dim=1)
            if layer.qk_norm is not None:
                qk = self._rms_norm(qk, layer.qk_norm)
            qk = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
            query, key = qk.split((a.num_heads, a.num_kv_heads), dim=1)
            cache.write(index, step, key, value)
            attended = [self._attend_chunk(index, cache, chunk, query[at : at + len(chunk)]) for at, chunk in starts]
            attended += self._attend_decode(index, cache, step, query[decode_start:] if starts else query)
            whole = attended[0] if len(attended) == 1 else torch.cat(attended)
            x = torch.addmm(x, whole, layer.output.t())
            normed = self._rms_norm(x, layer.post_norm)
            if layer.experts is not None:
                added, chosen = layer.experts.forward(normed)
                cache.write_routed(index, step, chosen)
                x = x + added
                continue
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down.t())
        if len(last) != len(x):
            x = x[torch.tensor(last, dtype=torch.int64, device=self.device)]
        return F.linear(self._rms_norm(x, self.final_norm), self.head).float()

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim, in f32 (Zhang and Sennrich 2019).

        In f32 on a CPU by four calls where torch's own makes nine: those are what a small model's step consists of.
        """
        if self._means is None:
            found = F.rms_norm(x, (x.shape[-1],), None, self.architecture.norm_eps)
            return found * weight
        square = (x * x).view(-1, x.shape[-1])
        scale = torch.addmm(self._eps, square, self._means[x.shape[-1]]).rsqrt_()
        return (x * scale.view(*x.shape[:-1], 1)).mul_(weight)

    def _attend_decode(self, layer: int, cache: KVCache, step: StepPlan, query: torch.Tensor) -> list[torch.Tensor]:
        """What each block's tokens attend to, [tokens, heads * head_dim]."""
        a = self.architecture
        grouped = query.view(-1, a.num_kv_heads, a.num_heads // a.num_kv_heads, a.head_dim)
        found = []
        for block in step.blocks:
            keys, values = cache.block_view(layer, block)
            attended = F.scaled_dot_product_attention(
                grouped if len(step.blocks) == 1 else grouped[block.queries],
                keys, values, attn_mask=block.mask, scale=self._scale,
            )  # fmt: skip
            found.append(attended.reshape(-1, a.query_size))
        return found

    def _attend_chunk(self, layer: int, cache: KVCache, chunk: Chunk, query: torch.Tensor) -> torch.Tensor:
        """What a prompt's piece attends to, [tokens, heads * head_dim]."""
        keys, values = cache.row_view(layer, chunk.row, chunk.end)
        mask = None
        if chunk.start:
            ends = torch.arange(chunk.start, chunk.end, device=self.device)
            mask = torch.arange(chunk.end, device=self.device) <= ends.unsqueeze(1)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, is_causal=mask is None, scale=self._scale,
            enable_gqa=True,
        )  # fmt: skip
        return attended[0].transpose(0, 1).reshape(len(query), -1)


def _layout(prefill: Sequence[Chunk], decode: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Row and position of every token of a forward."""
    rows = [chunk.row for chunk in prefill for _ in range(chunk.start, chunk.end)]
    positions = [position for chunk in prefill for position in range(chunk.start, chunk.end)]
    return rows + [row for row, _ in decode], positions + [position for _, position in decode]
