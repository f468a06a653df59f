"""The check of shapes is on: a signature that lies, or a call that breaks one, fails."""

import pytest
import torch
from jaxtyping import TypeCheckError

from rlagent.kernels.gae import gae_packed
from rlagent.kernels.logprob import linear_logprob
from rlagent.trainer.streams import LossInput


def test_streams_of_different_lengths_are_refused() -> None:
    three, four = torch.zeros(3), torch.zeros(4)
    with pytest.raises(TypeCheckError, match="advantages"):
        LossInput(
            logprobs=three, old_logprobs=three, rollout_logprobs=three, ref_logprobs=None, entropy=None, advantages=four,
            weight=three, loss_mask=three.bool(), sequence_index=three.long(),
        )  # fmt: skip


def test_a_mask_that_is_not_bool_is_refused() -> None:
    zero = torch.zeros(2)
    with pytest.raises(TypeCheckError, match="mask"):
        gae_packed(zero, zero, zero, torch.tensor([0, 2], dtype=torch.int32), 1.0, 1.0)


def test_one_target_a_hidden_state() -> None:
    with pytest.raises(TypeCheckError, match="target"):
        linear_logprob(torch.zeros(3, 4), torch.zeros(8, 4), torch.zeros(2, dtype=torch.int64))
