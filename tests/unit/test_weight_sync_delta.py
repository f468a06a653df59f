"""Deltas: lossless bit by bit, sparse where that is smaller, and a chain that refuses what does not follow."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, safe_open, save_file

from rlagent.errors import WeightSyncError
from rlagent.trainer.weight_sync.delta import apply, digest_of, encode
from rlagent.trainer.weight_sync.shadow import MAX_LINKS, Chain, Shadow

Weights = dict[str, torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """A policy, and the next one: of any bits, changed in none, some or all elements."""
    old, new = {}, {}
    for index in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 6), max_size=3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        bits = [torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator) for _ in range(2)]
        mask = torch.rand(count, generator=generator) < draw(st.sampled_from([0.0, 0.05, 1.0]))
        for named, raw in ((old, bits[0]), (new, torch.where(mask, bits[1], bits[0]))):
            named[str(index)] = raw.view(dtype).reshape(shape)
    return old, new


def same(left: Weights, right: Weights) -> bool:
    return digest_of(left) == digest_of(right)


@given(changes())
@settings(deadline=None, max_examples=100)
def test_what_is_applied_is_what_was_encoded(pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    before = digest_of(old)
    stored = encode(old, new.items())
    assert same(apply(old, stored), new)
    assert digest_of(old) == before
    assert sum(t.nbytes for t in stored.values()) <= sum(t.nbytes for t in new.values())


def test_negative_zero_and_nan_are_changes_and_equal_nans_are_none() -> None:
    old = {"w": torch.tensor([0.0, float("nan"), 1.0, 2.0, 3.0, 4.0])}
    new = {"w": torch.tensor([-0.0, float("nan"), 1.0, 2.0, 3.0, 4.0])}
    stored = encode(old, new.items())
    assert stored["w#at"].tolist() == [0]
    assert same(apply(old, stored), new)


def test_a_tensor_is_dense_where_positions_would_be_larger() -> None:
    old = {"w": torch.zeros(100)}
    few, many = torch.zeros(100), torch.zeros(100)
    few[:49], many[:50] = 1, 1
    assert set(encode(old, {"w": few}.items())) == {"w#at", "w#to"}
    assert set(encode(old, {"w": many}.items())) == {"w"}
    assert encode(old, old.items()) == {}
    assert set(encode(old, {"w": torch.zeros(50)}.items())) == {"w"}


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Chain, Shadow]:
    for name in ("chain", "shadow"):
        (tmp_path / name).mkdir()
    return Chain(tmp_path / "chain"), Shadow(tmp_path / "shadow")


def policy(version: int) -> Weights:
    found = torch.zeros(1000)
    found[:version] = float(version)
    return {"a": found, "b": torch.full((3, 3), 2.0)}


def test_a_chain_leads_the_shadow_from_version_to_version(chain: tuple[Chain, Shadow]) -> None:
    links, shadow = chain
    kinds = []
    for version in range(1, MAX_LINKS + 3):
        path, delta = links.add(version, policy(version))
        shadow.take(path)
        kinds.append("full" if delta.base is None else "sparse")
        assert shadow.version == version
        assert same(load_file(shadow.directory / "model.safetensors"), policy(version))
        assert delta.base is None or delta.num_bytes < 200
    assert kinds == ["full", *["sparse"] * (MAX_LINKS - 1), "full", "sparse"]
    assert len(list(path.parent.iterdir())) == 2  # a chain that begins anew drops the old one


def test_a_link_that_does_not_follow_is_refused_and_the_shadow_stays(chain: tuple[Chain, Shadow]) -> None:
    links, shadow = chain
    first, _ = links.add(1, policy(1))
    second, _ = links.add(2, policy(2))
    third, _ = links.add(3, policy(3))
    shadow.take(first)
    with pytest.raises(WeightSyncError, match="starts from version 2, and the shadow copy holds 1"):
        shadow.take(third)
    tensors = load_file(second)
    with safe_open(second, framework="pt") as file:
        metadata = file.metadata()
    save_file({**tensors, "a#to": tensors["a#to"] + 1}, second, metadata=metadata)
    with pytest.raises(WeightSyncError, match="does not lead to version 2"):
        shadow.take(second)
    second.write_bytes(second.read_bytes()[:50])
    with pytest.raises(WeightSyncError, match="cannot be read"):
        shadow.take(second)
    assert same(load_file(shadow.directory / "model.safetensors"), policy(1))
    assert shadow.version == 1


def test_after_a_failure_the_next_link_is_full(chain: tuple[Chain, Shadow]) -> None:
    links, shadow = chain
    shadow.take(links.add(1, policy(1))[0])
    links.add(2, policy(2))
    links.forget()
    path, delta = links.add(3, policy(3))
    assert delta.base is None
    shadow.take(path)
    assert shadow.version == 3
