"""The Triton policy loss: equal to plain torch under the interpreter, values, gradients and statistics; compiled to PTX without a GPU."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlagent.kernels import policy_loss_triton
from rlagent.trainer.loss import FUSED

INTERPRETED = """
import itertools, torch
from rlagent.kernels import policy_loss_triton
from rlagent.trainer.config import CorrectionConfig, LossConfig
from rlagent.trainer.loss import policy_loss
from rlagent.trainer.streams import LossInput

policy_loss_triton.policy_loss.__kwdefaults__["block"] = 16  # several programs
torch.manual_seed(0)
CORRECTIONS = (CorrectionConfig(), CorrectionConfig(name="tis", level="sequence"),
               CorrectionConfig(name="icepop", low=0.7, high=1.5, veto=0.2))
CASES = [
    ("ppo", {}, 0), ("ppo", {"dual_clip": 1.5}, 1), ("ppo", {"kl_coef": 0.3, "entropy_coef": 0.1, "clip_high": 0.5}, 2),
    ("ppo", {"kl_coef": 0.3, "kl_estimator": "k1"}, 0), ("ppo", {"kl_coef": 0.3, "kl_estimator": "k2"}, 0),
    ("ppo", {"kl_coef": 0.3, "kl_estimator": "k3_unbiased"}, 0), ("reinforce", {"kl_coef": 0.3, "kl_in": "reward"}, 0),
    ("cispo", {"entropy_coef": -0.1}, 1), ("reinforce", {}, 2), ("decoupled_ppo", {"dual_clip": 2.0}, 0),
]
for count, (name, options, which) in itertools.product((1, 50), CASES):
    mask = torch.rand(count) < 0.7
    mask[0] = count > 1

    def stream(scale):
        values = torch.randn(count) * scale
        return torch.where(mask, values, torch.nan)  # what stands under the mask touches nothing

    logprobs = (stream(1.0) - 2).requires_grad_()
    old = logprobs.detach() + stream(0.4)
    if count > 1:
        old[0] = logprobs.detach()[0] - 20  # far beyond every clip
    entropy = stream(1.0).requires_grad_()
    advantages = torch.where(mask, torch.randn(count), 0)
    s = LossInput(
        logprobs=logprobs, old_logprobs=old, rollout_logprobs=logprobs.detach() + stream(0.3),
        ref_logprobs=logprobs.detach() + stream(0.5), entropy=entropy if options.get("entropy_coef") else None,
        advantages=advantages,
        weight=torch.rand(count), loss_mask=mask, sequence_index=torch.arange(count) // 7,
        fresh=None if name == "cispo" else torch.rand(count) < 0.5,
    )
    config = LossConfig(name=name, **options)
    ours, theirs = (policy_loss(s, config, CORRECTIONS[which], backend) for backend in ("triton", "torch"))
    assert set(ours.stats) == set(theirs.stats), set(ours.stats) ^ set(theirs.stats)
    for key in theirs.stats:
        pair = ours.stats[key].double(), theirs.stats[key].double()
        torch.testing.assert_close(*pair, rtol=2e-5, atol=2e-5, msg=lambda m: f"{name} {options} {key}: {m}")
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    wanted = [logprobs] if s.entropy is None else [logprobs, entropy]
    for a, b in zip(*(torch.autograd.grad(3 * x.loss, wanted) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name} {options}: {m}")
print("equal")
"""


def test_the_kernel_under_the_interpreter_agrees_with_plain_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


def test_every_loss_that_goes_through_the_kernel_is_known_to_it() -> None:
    assert set(FUSED) == set(policy_loss_triton.KINDS)


@pytest.mark.parametrize(
    ("kind", "dual", "kl", "optional"), [(0, True, 3, True), (0, False, 0, False), (1, False, 4, True)]
)
def test_the_kernel_compiles_for_hopper(kind: int, dual: bool, kl: int, optional: bool) -> None:
    function = policy_loss_triton.policy_loss_kernel
    kinds = ["*fp32"] * 5 + ["*i8"] + ["*fp32"] * 3 + ["*i8"] + ["*fp32"] * 3 + ["i32"] + ["fp32"] * 5
    constants = {
        "KIND": kind, "DUAL": dual, "KL_KIND": kl, "HAS_FACTOR": optional, "HAS_ENTROPY": optional, "HAS_FRESH": optional,
        "NUM_SUMS": len(policy_loss_triton.SUMS), "COLUMNS": 23, "BLOCK": policy_loss_triton.BLOCK,
    }  # fmt: skip
    types = dict(zip(function.arg_names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert ".entry policy_loss_kernel" in compiled.asm["ptx"]
    assert ".f64" not in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
