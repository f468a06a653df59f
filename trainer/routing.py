"""What was recorded of the engine's routing, checked and made usable. From a step's Batch to its microbatches.

Invariant: what the learner replays are top_k different experts of each layer that has experts, or nothing for that token: it is
then routed by the learner, and counted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlagent.errors import LearnerError
from rlagent.trainer.model.architecture import Architecture
from rlagent.types import Batch


def replayable(batch: Batch, arch: Architecture, *, replay: bool) -> Batch:
    """The batch with experts that can be replayed, or without any. LearnerError where they are of another model."""
    if batch.experts is None or arch.experts is None or not replay:
        return replace(batch, experts=None)
    width = arch.num_layers * arch.experts.top_k
    if batch.experts.shape != (batch.num_tokens, width):
        raise LearnerError(
            f"{batch.experts.shape[1]} expert ids were recorded a token, the model has {arch.num_layers} layers of "
            f"{arch.experts.top_k}: engine and learner differ in model"
        )
    layers = batch.experts.reshape(-1, arch.num_layers, arch.experts.top_k)[:, list(arch.experts.layers)]
    if layers.size and int(layers.max()) >= arch.experts.count:
        raise LearnerError(
            f"expert {int(layers.max())} was recorded, the model has {arch.experts.count}: engine and learner differ in model"
        )
    # An engine that did not see a token's routing tells zeros for all of its experts.
    ordered = np.sort(layers, axis=-1)
    known: npt.NDArray[np.bool_] = np.asarray(
        (ordered[..., 0] >= 0).all(1) & (np.diff(ordered, axis=-1) > 0).all((1, 2))
    )
    return replace(batch, experts=np.where(known[:, None], batch.experts, np.int16(-1)))


def routing_metrics(batch: Batch) -> dict[str, float]:
    """Of tokens that score others (all but each row's last), how many were replayed and how many routed anew."""
    if batch.experts is None:
        return {}
    matters: npt.NDArray[np.bool_] = np.ones(batch.num_tokens, np.bool_)
    matters[batch.cu_seqlens[1:][np.diff(batch.cu_seqlens) > 0] - 1] = False
    known = batch.experts.max(1) >= 0
    return {
        "routing/replayed": float((known & matters).sum()),
        "routing/unknown": float((~known & matters).sum()),
    }
