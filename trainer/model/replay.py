"""Routing replay: a mixture's layer takes the experts that the engine gave to each token, with gates of its own router.

"Stabilizing MoE RL by Aligning Training and Inference Routers" (R3, arXiv 2510.11370): the choice of experts is a mask taken from
the engine, the gates stay the softmax of the learner's own logits, here over the replayed experts, so the router still learns.
A token whose experts are not known is routed by the learner's own top k. The layer hands its microbatch to its router before it
runs, in an activation recompute too, so that any schedule of microbatches replays the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlagent.trainer.model.megatron import TransformerLayer
from rlagent.trainer.model.packing import PackedRows


class ReplayedRouting:
    """What megatron's router asks for the best experts, in place of its own top k."""

    def __init__(self, layer: int) -> None:
        """layer: its number in the whole model, from 0."""
        self.layer = layer
        self.rows: PackedRows | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """scores [t, experts] -> those of the chosen experts, and their ids, both [t, topk]."""
        own, chosen = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.rows is None or self.rows.experts is None:
            return own, chosen
        recorded = self.rows.experts[:, self.layer * topk : (self.layer + 1) * topk].long()
        chosen = torch.where(recorded[:, :1] < 0, chosen, recorded)
        return scores.gather(1, chosen), chosen


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer with experts."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """As TransformerLayer's."""
        self.mlp.router.router_replay.rows = options.get("packed_seq_params")
        return super().forward(*args, **options)
