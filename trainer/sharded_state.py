"""The state of megatron's distributed optimizer, parameter by parameter. Used by optimizer.py for checkpoints.

Each data-parallel rank updates one slice of every buffer of parameters, whatever parameters begin and end in it. A checkpoint knows
nothing of that: `gather` makes whole parameters of the slices, and `restore` takes this rank's slices out of whole ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

STEP: Final = "step"
MOMENTS: Final = ("exp_avg", "exp_avg_sq", STEP)


def _owners(inner: Any) -> dict[int, Any]:
    """By the id of a model's parameter, the optimizer that updates it (experts have one of their own)."""
    return {
        id(parameter): part
        for part in inner.chained_optimizers
        for buffer in part.buffers
        for parameter in buffer.param_index_map
    }


def _own_slice(part: Any, parameter: Tensor) -> tuple[slice, Tensor] | None:
    """What of the flattened parameter this rank updates, and the fp32 tensor that AdamW moves for it."""
    place = part.model_param_group_index_map.get(parameter)
    if place is None:
        return None
    span = part._get_model_param_range_map(parameter)["param"]
    group, order = place
    return slice(span.start, span.end), part.optimizer.param_groups[group]["params"][order]


def gather(inner: Any, parameters: Sequence[Tensor]) -> dict[int, dict[str, Tensor]]:
    """On the first rank of each parameter's data-parallel group: by its id, its fp32 weights, moments and step, whole and on
    the CPU. Every rank must call it with the same parameters in the same order.
    """
    owners = _owners(inner)
    found: dict[int, dict[str, Tensor]] = {}
    for parameter in parameters:
        part = owners[id(parameter)]
        kept = ("param", *MOMENTS[:2])
        # AdamW's step rides along, as the largest of all ranks': a slice may be empty here, or not have stepped.
        whole = torch.zeros(len(kept), parameter.numel(), device=parameter.device)
        step = torch.full((1,), -1.0, device=parameter.device)
        own = _own_slice(part, parameter)
        if own is not None:
            span, master = own
            state = {"param": master.detach()} | part.optimizer.state[master]
            for row, key in enumerate(kept):
                if key in state:
                    whole[row, span] = state[key]
            if STEP in state:
                step.fill_(float(state[STEP]))
        group = part.data_parallel_group
        leader = dist.get_global_rank(group, 0)
        dist.reduce(whole, leader, group=group)
        dist.reduce(step, leader, dist.ReduceOp.MAX, group=group)
        if group.rank():
            continue
        rows = dict(zip(kept, whole.cpu().view(len(kept), *parameter.shape), strict=True))
        found[id(parameter)] = {"param": rows["param"]} if step < 0 else rows | {STEP: step.cpu()[0]}
    return found


@torch.no_grad()
def restore(inner: Any, parameters: Sequence[Tensor], states: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Set the model's parameters, and of what `gather` gave for them this rank's slices."""
    owners = _owners(inner)
    for parameter in parameters:
        saved = states[id(parameter)]
        parameter.copy_(saved["param"])
        part = owners[id(parameter)]
        own = _own_slice(part, parameter)
        if own is None:
            continue
        span, master = own
        master.copy_(saved["param"].flatten()[span])
        state = part.optimizer.state[master]
        state.clear()
        for key in MOMENTS:
            if key in saved:
                # AdamW counts steps in a tensor of each slice's own: one that is shared would count them all.
                state[key] = (
                    saved[key].clone() if key == STEP else saved[key].flatten()[span].to(master.device, copy=True)
                )
