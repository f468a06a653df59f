"""The Triton policy loss: equal to plain torch under the interpreter, values, gradients and statistics; compiled to PTX without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlagent.kernels import policy_loss_triton
from rlagent.trainer.loss import FUSED

INTERPRETED = """
from policy_streams import CASES, assert_kernel_is_torch, random_streams
from rlagent.kernels import policy_loss_triton

policy_loss_triton.policy_loss.__kwdefaults__["block"] = 16  # several programs
for count in (1, 50):
    for case, (loss, correction) in enumerate(CASES):
        streams = random_streams(count, entropy=bool(loss.entropy_coef), seed=case)
        assert_kernel_is_torch(streams, loss, correction, 2e-5)
print("equal")
"""
SUPPORT = Path(__file__).parents[1] / "support"


def test_the_kernel_under_the_interpreter_agrees_with_plain_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=SUPPORT, capture_output=True, text=True,
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
