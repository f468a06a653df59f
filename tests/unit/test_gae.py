"""Generalised advantages of packed rows: by hand, invariants 17 and 18, and what a Triton kernel makes of them."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlagent.kernels import gae_triton
from rlagent.kernels.gae import gae_packed

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def rows(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    mask = torch.rand(n, generator=generator) < 0.6
    reward, value = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.where(mask, reward, 0.0), value, mask, bounds


def by_definition(reward: Tensor, value: Tensor, mask: Tensor, bounds: Tensor, gamma: float, lam: float) -> Tensor:
    found = torch.zeros_like(reward)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        ahead = v_next = 0.0
        for t in range(end - 1, start - 1, -1):
            if mask[t]:
                ahead = float(reward[t]) + gamma * v_next - float(value[t]) + gamma * lam * ahead
                v_next, found[t] = float(value[t]), ahead
    return found


def test_by_hand() -> None:
    reward, value = torch.tensor([0.0, 0.0, 9.0, 1.0]), torch.tensor([0.5, 0.25, 7.0, 0.5])
    mask, bounds = torch.tensor([True, True, False, True]), torch.tensor([0, 4], dtype=torch.int32)
    advantage, returns = gae_packed(reward, value, mask, bounds, 1.0, 0.5)
    assert advantage.tolist() == [0.0, 0.5, 0.0, 0.5]  # 0.25 - 0.5 + 0.5 * 0.5; 0.5 - 0.25 + 0.5 * 0.5; -; 1 - 0.5
    assert returns.tolist() == [0.5, 0.75, 0.0, 1.0]


@given(LENGTHS, st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_it_is_its_definition(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    given_rows = rows(lengths, seed)
    advantage, returns = gae_packed(*given_rows, gamma, lam)
    torch.testing.assert_close(advantage, by_definition(*given_rows, gamma, lam), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(returns, torch.where(given_rows[2], advantage + given_rows[1], 0.0))


@given(LENGTHS, st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_invariant_17_observations_might_as_well_be_deleted(lengths: list[int], seed: int) -> None:
    reward, value, mask, bounds = rows(lengths, seed)
    whole = gae_packed(reward, value, mask, bounds, 0.9, 0.8)
    kept = torch.tensor([0, *(int(mask[a:b].sum()) for a, b in itertools.pairwise(bounds.tolist()))]).cumsum(0).int()
    short = gae_packed(reward[mask], value[mask], torch.ones(int(kept[-1]), dtype=torch.bool), kept, 0.9, 0.8)
    for one, other in zip(whole, short, strict=True):
        assert torch.equal(one[mask], other)
        assert not one[~mask].any()


def test_invariant_18_without_discount_it_is_the_return_less_the_value() -> None:
    reward, value, mask, bounds = rows([6, 1, 0, 9])
    advantage, returns = gae_packed(reward, value, mask, bounds, 1.0, 1.0)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        to_go = reward[start:end].flip(0).cumsum(0).flip(0)
        own = mask[start:end]
        torch.testing.assert_close(returns[start:end][own], to_go[own])
        torch.testing.assert_close(advantage[start:end][own], (to_go - value[start:end])[own])


INTERPRETED = """
import torch
from rlagent.kernels import gae, gae_triton
torch.manual_seed(0)
lengths = [1, 16, 0, 37, 8]
n = sum(lengths)
mask = torch.rand(n) < 0.6
reward, value = torch.randn(n), torch.randn(n)
value[~mask] = float("nan")
bounds = torch.tensor([0, *lengths]).cumsum(0).int()
for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (0.5, 0.0)):
    found = gae_triton.gae_packed(reward, value, mask, bounds, gamma, lam, block=16)
    wanted = gae.reference(reward, value, mask, bounds, gamma, lam)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
print("equal")
"""


def test_the_kernel_under_the_interpreter_agrees_with_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("block", [64, gae_triton.BLOCK])
def test_the_kernel_compiles_for_hopper(block: int) -> None:
    function = gae_triton.gae_kernel
    kinds = ["*fp32", "*fp32", "*i8", "*i32", "*fp32", "*fp32", "fp32", "fp32"]
    types = dict(zip(function.arg_names, kinds, strict=False)) | {"BLOCK": "constexpr"}
    source = ASTSource(fn=function, signature=types, constexprs={"BLOCK": block})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert ".entry gae_kernel" in compiled.asm["ptx"]
    assert ".f64" not in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
