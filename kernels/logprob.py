"""linear_logprob: hidden states and the head's weight to the log-probabilities of given tokens, without the batch's logits.

Chunked over tokens; the backward pass begins with the last chunk, whose logits are still there, and computes those of the others
again. cuBLAS (or MKL) does the matrix products, a row kernel the softmax statistics: Triton on a GPU, plain torch elsewhere. The
vocabulary may be sharded over a tensor-parallel group.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from rlagent.kernels.reference import Partial, gradient_rows_, partial_rows

Backend = Literal["auto", "torch", "triton"]


def linear_logprob(
    hidden: Float[Tensor, "t h"], weight: Float[Tensor, "v h"], target: Int64[Tensor, " t"], *,
    temperature: float | Float[Tensor, " t"] = 1.0, ignore_index: int = -100, return_entropy: bool = False,
    tp_group: Any = None, chunk: int = 2048, backend: Backend = "auto", vocab_size: int | None = None,
) -> tuple[Float32[Tensor, " t"], Float32[Tensor, " t"] | None]:  # fmt: skip
    """log_softmax(hidden weight^T / temperature) at `target`, and optionally its entropy.

    weight: with tp_group this rank's contiguous shard, shards in rank order; target: global ids, or ignore_index (logprob and
    entropy 0, no gradient); columns >= vocab_size are padding. Returns (logprob, entropy or None), both differentiable in hidden
    and weight.
    """
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(hidden.shape[0])
    rows = _rows(backend, hidden.device)
    keep = torch.is_grad_enabled()
    logprob, entropy = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, scale, ignore_index, return_entropy, tp_group, chunk, vocab_size, rows, keep
    )
    return logprob, entropy if return_entropy else None


def _rows(backend: Backend, device: torch.device) -> Any:
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return partial_rows, gradient_rows_
    from rlagent.kernels import logprob_triton

    return logprob_triton.partial_rows, logprob_triton.gradient_rows_


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, ignore_index: int,
        return_entropy: bool, group: Any, chunk: int, vocab_size: int | None, rows: Any, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        shard = _Shard(weight, group, vocab_size)
        ctx.set_materialize_grads(False)
        kept = target != ignore_index
        # What an ignored row holds, NaN included, must not reach a gradient.
        hidden = torch.where(kept.unsqueeze(1), hidden, 0.0)
        temperature = torch.where(kept, temperature, 1.0)
        lse, logprob, entropy = (hidden.new_empty(len(target), dtype=torch.float32) for _ in range(3))
        z = None
        for part in _chunks(len(target), chunk):
            z = shard.logits(hidden[part], weight, temperature[part])
            found = shard.combine(rows[0](z, shard.local(target[part])))
            lse[part] = found.maximum + found.sum_exp.log()
            logprob[part] = found.target - lse[part]
            entropy[part] = lse[part] - found.sum_exp_z / found.sum_exp
        ctx.save_for_backward(hidden, weight, target, temperature, lse, entropy, kept)
        ctx.options = (return_entropy, shard, chunk, rows)
        ctx.last_logits = z if keep else None
        return torch.where(kept, logprob, 0.0), torch.where(kept, entropy, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, temperature, lse, entropy, kept = ctx.saved_tensors
        return_entropy, shard, chunk, rows = ctx.options
        grad_logprob = torch.zeros_like(lse) if grads[0] is None else torch.where(kept, grads[0], 0.0) / temperature
        grad_entropy = None
        if return_entropy and grads[1] is not None:
            grad_entropy = torch.where(kept, grads[1], 0.0) / temperature
        grad_hidden = torch.empty_like(hidden)
        wanted = ctx.needs_input_grad[1]  # not of a frozen head
        grad_weight = torch.zeros(weight.shape if wanted else (0, 0), dtype=torch.float32, device=weight.device)
        # Rows are overwritten by their gradients, so a second backward pass computes them all.
        z, ctx.last_logits = ctx.last_logits, None
        for part in reversed(_chunks(len(target), chunk)):
            if z is None:
                z = shard.logits(hidden[part], weight, temperature[part])
            dz = rows[1](
                z, shard.local(target[part]), lse[part], entropy[part], grad_logprob[part],
                None if grad_entropy is None else grad_entropy[part],
            ).to(weight.dtype)  # fmt: skip
            grad_hidden[part] = dz @ weight[: shard.valid]
            if wanted:
                grad_weight[: shard.valid] += dz.T @ hidden[part].to(weight.dtype)
            z = None
        if shard.group is not None:
            dist.all_reduce(grad_hidden, group=shard.group)
        return grad_hidden, grad_weight.to(weight.dtype) if wanted else None, *([None] * 9)


class _Shard:
    """This rank's part of the vocabulary."""

    def __init__(self, weight: Tensor, group: Any, vocab_size: int | None) -> None:
        self.group = group
        self.size = weight.shape[0]
        self.start = 0 if group is None else dist.get_rank(group) * self.size
        # Padding rows of the weight are left out of the product: no column has to be masked afterwards.
        self.valid = self.size if vocab_size is None else min(self.size, max(0, vocab_size - self.start))

    def logits(
        self, hidden: Float[Tensor, "c h"], weight: Float[Tensor, "v h"], temperature: Float[Tensor, " c"]
    ) -> Float32[Tensor, "c valid"]:
        """z of a chunk."""
        z = (hidden.to(weight.dtype) @ weight[: self.valid].T).float()
        return z.div_(temperature.unsqueeze(1))

    def local(self, target: Int64[Tensor, " c"]) -> Int64[Tensor, " c"]:
        """Targets as indices into the shard, -1 where they lie elsewhere or are ignored."""
        index = target - self.start
        return torch.where((index >= 0) & (index < self.size) & (target >= 0), index, -1)

    def combine(self, partial: Partial) -> Partial:
        """Statistics over all shards."""
        if self.group is None:
            return partial
        maximum = partial.maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self.group)
        rescale = (partial.maximum - maximum).exp()
        sums = torch.stack((partial.sum_exp * rescale, partial.sum_exp_z * rescale, partial.target))
        dist.all_reduce(sums, group=self.group)
        return Partial(maximum, sums[0], sums[1], sums[2])


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(length, start + chunk)) for start in range(0, length, chunk)]
