"""The Triton row kernels: equal to the reference under the interpreter, and compiled to PTX without a GPU."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlagent.kernels import logprob_triton

INTERPRETED = """
import torch
from rlagent.kernels import reference, logprob_triton
from rlagent.kernels.logprob import linear_logprob

torch.manual_seed(0)
for rows, columns, block in ((1, 1, 16), (5, 37, 16), (64, 1000, 256), (7, 64, 64), (3, 130, 128)):
    z = torch.randn(rows, columns) * 3
    if columns > 40:
        z[:, -9:] = -torch.inf  # padding of the vocabulary
        z[0, :20] = -torch.inf  # a first tile of padding only
    target = torch.randint(20, max(21, columns - 9), (rows,)) if columns > 40 else torch.randint(0, columns, (rows,))
    target[0] = -1
    ours, theirs = logprob_triton.partial_rows(z, target, block=block), reference.partial_rows(torch.where(z.isinf(), -1e30, z), target)
    for name in ("maximum", "sum_exp", "sum_exp_z", "target"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    lse = ours.maximum + ours.sum_exp.log()
    entropy = lse - ours.sum_exp_z / ours.sum_exp
    g, h = torch.randn(rows), torch.randn(rows)
    for grad_entropy in (None, h):
        found = logprob_triton.gradient_rows_(z.clone(), target, lse, entropy, g, grad_entropy, block=block)
        expected = reference.gradient_rows_(torch.where(z.isinf(), -1e30, z), target, lse, entropy, g, grad_entropy)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

# Rows of a wider matrix.
wide = torch.randn(4, 200)
target = torch.tensor([3, 149, -1, 0])
ours, theirs = (rows.partial_rows(wide[:, :150], target) for rows in (logprob_triton, reference))
for name in ("maximum", "sum_exp", "sum_exp_z", "target"):
    torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)

# The whole head, as a GPU runs it.
hidden, weight = torch.randn(33, 16, requires_grad=True), torch.randn(131, 16, requires_grad=True)
target = torch.randint(0, 120, (33,))
target[5] = -100
found = []
for backend in ("triton", "torch"):
    logprob, entropy = linear_logprob(
        hidden, weight, target, temperature=0.7, return_entropy=True, chunk=10, backend=backend, vocab_size=120
    )
    gradients = torch.autograd.grad(logprob.sum() + 0.3 * entropy.sum(), (hidden, weight), retain_graph=True)
    found.append((logprob, entropy, *gradients, *torch.autograd.grad(logprob.sum(), (hidden, weight))))
for a, b in zip(*found, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
print("equal")
"""


def test_the_interpreter_agrees_with_the_reference() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize(
    ("kernel", "signature", "constants"),
    [
        ("partial_kernel", ["*fp32", "*i64", "*fp32", "*fp32", "*fp32", "*fp32", "i32", "i32"], {"BLOCK": 4096}),
        (
            "gradient_kernel",
            ["*fp32", "*i64", "*fp32", "*fp32", "*fp32", "*fp32", "i32", "i32"],
            {"HAS_ENTROPY": True, "BLOCK": 4096},
        ),
        (
            "gradient_kernel",
            ["*fp32", "*i64", "*fp32", "*fp32", "*fp32", "*fp32", "i32", "i32"],
            {"HAS_ENTROPY": False, "BLOCK": 4096},
        ),
    ],
)
def test_the_kernels_compile_for_hopper(kernel: str, signature: list[str], constants: dict[str, object]) -> None:
    function = getattr(logprob_triton, kernel)
    names = function.arg_names
    types = dict(zip(names, signature, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert ".target sm_90" in compiled.asm["ptx"]
    assert f".entry {kernel}" in compiled.asm["ptx"]
    assert ".f64" not in compiled.asm["ptx"]  # nothing was promoted
    assert compiled.asm["cubin"]
