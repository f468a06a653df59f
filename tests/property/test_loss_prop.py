"""Losses on any streams: microbatches sum, masks cut, and corrections stay inside their bounds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.correction import correction
from rlagent.trainer.loss import policy_loss
from rlagent.trainer.streams import LossInput
from rlagent.trainer.token_loss import TOKEN_LOSSES

SEEDS = st.integers(0, 10_000)
NAMES = st.sampled_from(sorted(TOKEN_LOSSES))
CORRECTIONS = st.builds(
    CorrectionConfig,
    name=st.sampled_from(["none", "tis", "mis"]),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    veto=st.sampled_from([None, 0.3]),
)
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def make(seed: int, lengths: list[int]) -> LossInput:
    """Random streams of sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(mean: float, std: float) -> Tensor:
        return mean + std * torch.randn(n, generator=generator, dtype=torch.float64)

    mask = torch.rand(n, generator=generator) < 0.7
    return LossInput(
        logprobs=normal(-1, 0.5),
        old_logprobs=normal(-1, 0.5),
        rollout_logprobs=normal(-1, 0.5),
        ref_logprobs=normal(-1, 0.5),
        entropy=normal(2, 0.5),
        advantages=normal(0, 1),
        weight=torch.where(mask, 1.0 / max(1, int(mask.sum())), 0.0).double(),
        loss_mask=mask,
        sequence_index=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    )


def take(s: LossInput, index: Tensor) -> LossInput:
    fields: dict[str, Any] = {name: getattr(s, name) for name in LossInput.__dataclass_fields__}
    return LossInput(**{name: None if value is None else value[index] for name, value in fields.items()})


def gradient(s: LossInput, name: str, c: CorrectionConfig) -> tuple[float, Tensor]:
    x = s.logprobs.clone().requires_grad_()
    found = policy_loss(replace(s, logprobs=x), LossConfig(name=name, kl_coef=0.1, entropy_coef=0.01), c).loss
    return found.item(), torch.autograd.grad(found, x)[0]


@given(SEEDS, LENGTHS, NAMES, CORRECTIONS)
@settings(deadline=None, max_examples=60)
def test_invariants_2_and_5_sequences_in_any_order_and_microbatch(
    seed: int, lengths: list[int], name: str, c: CorrectionConfig
) -> None:
    s = make(seed, lengths)
    loss, whole = gradient(s, name, c)
    total = 0.0
    for sequence in reversed(range(len(lengths))):
        index = torch.nonzero(s.sequence_index == sequence).squeeze(1)
        part, found = gradient(take(s, index), name, c)
        total += part
        assert torch.allclose(found, whole[index])
    assert total == pytest.approx(loss)


@given(SEEDS, LENGTHS, NAMES, CORRECTIONS)
@settings(deadline=None, max_examples=60)
def test_invariants_6_and_7_a_masked_token_is_as_if_deleted(
    seed: int, lengths: list[int], name: str, c: CorrectionConfig
) -> None:
    s = make(seed, lengths)
    hole = torch.where(s.loss_mask, 0.0, torch.nan)
    dirty = replace(s, logprobs=s.logprobs + hole, old_logprobs=s.old_logprobs + hole, entropy=s.entropy + hole)
    loss, found = gradient(dirty, name, c)
    assert (found[~s.loss_mask] == 0).all()
    if s.loss_mask.any():
        kept, expected = gradient(take(s, torch.nonzero(s.loss_mask).squeeze(1)), name, c)
        assert loss == pytest.approx(kept)
        assert torch.allclose(found[s.loss_mask], expected)
    else:
        assert loss == 0


@given(SEEDS, LENGTHS, CORRECTIONS)
@settings(deadline=None, max_examples=60)
def test_factors_are_zero_or_within_the_bounds(seed: int, lengths: list[int], c: CorrectionConfig) -> None:
    s = make(seed, lengths)
    log_w = torch.where(s.loss_mask, s.old_logprobs - s.rollout_logprobs, 0.0)
    found = correction(log_w, s.loss_mask, s.sequence_index, c)
    if found is None:
        assert (c.name, c.veto) == ("none", None)
        return
    kept = found[found > 0]
    assert (found >= 0).all()
    assert (kept <= c.high).all()
    if c.name == "mis":
        assert (kept >= c.low).all()
    if c.level != "token" and c.name != "none":  # a sequence is judged as one
        for sequence in range(len(lengths)):
            assert len(set(found[s.sequence_index == sequence].tolist())) == 1


@given(SEEDS, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
@settings(deadline=None, max_examples=60)
def test_ppo_is_never_below_the_unclipped_objective(seed: int, low: float, high: float) -> None:
    # The clipped objective is a pessimistic bound (PPO, arXiv 1707.06347, sec. 3).
    s = make(seed, [6])
    ratio = (s.logprobs - s.old_logprobs).exp()
    plain = LossConfig(clip_low=low, clip_high=high)
    found = TOKEN_LOSSES["ppo"](s, plain)
    assert (found >= -s.advantages * ratio - 1e-12).all()
    dual = TOKEN_LOSSES["ppo"](s, LossConfig(clip_low=low, clip_high=high, dual_clip=3.0))
    assert (dual <= found).all()
    assert (dual[s.advantages < 0] <= -3 * s.advantages[s.advantages < 0] + 1e-12).all()
