"""The Triton policy loss on a GPU against plain torch on the same device: loss, statistics and gradients; and its own bits again."""

import pytest
import torch
from policy_streams import CASES, assert_kernel_is_torch, random_streams

from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.loss import policy_loss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 1023, 1025, 200_003])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_kernel_is_plain_torch(count: int, case: int) -> None:
    loss, correction = CASES[case]
    streams = random_streams(count, entropy=bool(loss.entropy_coef), device="cuda", seed=case)
    assert_kernel_is_torch(streams, loss, correction, 2e-4)


def test_a_gpu_takes_the_kernel_by_itself_and_gives_the_same_bits_each_time() -> None:
    streams = random_streams(50_000, entropy=True, device="cuda")
    config = LossConfig(kl_coef=0.1, entropy_coef=0.01)
    found = [policy_loss(streams, config, CorrectionConfig(), backend) for backend in ("auto", "triton", "triton")]
    for each in found[1:]:
        assert torch.equal(each.loss, found[0].loss)
        assert all(torch.equal(each.stats[name], number) for name, number in found[0].stats.items())
