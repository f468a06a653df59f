"""Random streams for a policy loss on any device, and that a kernel's answers on them are plain torch's."""

from __future__ import annotations

import torch

from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.loss import policy_loss
from rlagent.trainer.streams import LossInput

CASES: tuple[tuple[LossConfig, CorrectionConfig], ...] = tuple(
    (LossConfig(**loss), CorrectionConfig(**correction))  # type: ignore[arg-type]
    for loss, correction in (
        ({"name": "ppo"}, {}),
        ({"name": "ppo", "dual_clip": 1.5, "clip_high": 0.5}, {"name": "tis", "level": "sequence"}),
        (
            {"name": "ppo", "kl_coef": 0.3, "entropy_coef": 0.1},
            {"name": "icepop", "low": 0.7, "high": 1.5, "veto": 0.2},
        ),
        ({"name": "ppo", "kl_coef": 0.3, "kl_estimator": "k1"}, {}),
        ({"name": "ppo", "kl_coef": 0.3, "kl_estimator": "k2"}, {}),
        ({"name": "ppo", "kl_coef": 0.3, "kl_estimator": "k3_unbiased"}, {}),
        ({"name": "reinforce", "kl_coef": 0.3, "kl_in": "reward"}, {}),
        ({"name": "cispo", "entropy_coef": -0.1}, {"name": "tis"}),
        ({"name": "decoupled_ppo", "dual_clip": 2.0}, {}),
        ({"name": "opd"}, {}),
        ({"name": "dpo"}, {}),
    )
)
ROW = 7  # tokens


def random_streams(count: int, *, entropy: bool, device: str = "cpu", seed: int = 0) -> LossInput:
    """Seven of ten tokens sampled; under the mask stands NaN, and one token is far beyond every clip."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, generator=draw) < 0.7
    mask[0] = count > 1

    def stream(scale: float) -> torch.Tensor:
        return torch.where(mask, torch.randn(count, generator=draw) * scale, torch.nan)

    logprobs = stream(1.0) - 2
    old = logprobs + stream(0.4)
    if count > 1:
        old[0] = logprobs[0] - 20
    made = {
        "logprobs": logprobs, "old_logprobs": old, "rollout_logprobs": logprobs + stream(0.3), "ref_logprobs": logprobs + stream(0.5),
        "advantages": torch.where(mask, torch.randn(count, generator=draw), 0), "weight": torch.rand(count, generator=draw) / count,
        "loss_mask": mask, "sequence_index": torch.arange(count) // ROW, "fresh": torch.rand(count, generator=draw) < 0.5,
    }  # fmt: skip
    there = {name: tensor.to(device) for name, tensor in made.items()}
    there["logprobs"].requires_grad_()
    return LossInput(**there, entropy=stream(1.0).to(device).requires_grad_() if entropy else None)


def assert_kernel_is_torch(s: LossInput, loss: LossConfig, correction: CorrectionConfig, tolerance: float) -> None:
    """Loss, statistics (relative to their size) and gradients of the Triton kernel and of plain torch."""
    ours, theirs = (policy_loss(s, loss, correction, backend) for backend in ("triton", "torch"))  # type: ignore[arg-type]
    assert ours.stats.keys() == theirs.stats.keys()
    for key, wanted in theirs.stats.items():
        told = f"{loss} {key}: {float(ours.stats[key])}, not {float(wanted)}"
        assert torch.isclose(ours.stats[key].double(), wanted.double(), rtol=tolerance, atol=tolerance), told
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=tolerance, atol=tolerance)
    wanted_of = [s.logprobs] if s.entropy is None else [s.logprobs, s.entropy]
    for a, b in zip(*(torch.autograd.grad(3 * found.loss, wanted_of) for found in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"{loss}: {m}")
