"""Lag along the lineage of random publish trees, against its definition."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.buffer.policies import in_lineage, lag


@st.composite
def trees(draw: st.DrawFn) -> dict[int, tuple[int | None, int]]:
    tree: dict[int, tuple[int | None, int]] = {0: (None, 0)}
    for version in range(1, draw(st.integers(1, 12))):
        parent = draw(st.integers(0, version - 1))
        tree[version] = (parent, tree[parent][1] + 1)
    return tree


def ancestors(tree: dict[int, tuple[int | None, int]], version: int | None) -> list[int]:
    found = []
    while version is not None:
        found.append(version)
        version = tree[version][0]
    return found


@settings(max_examples=200, deadline=None)
@given(trees(), st.data())
def test_lag_is_the_depth_of_the_current_version_below_the_last_common_ancestor(
    tree: dict[int, tuple[int | None, int]], data: st.DataObject
) -> None:
    version, current = data.draw(st.sampled_from(sorted(tree))), data.draw(st.sampled_from(sorted(tree)))
    common = set(ancestors(tree, version)) & set(ancestors(tree, current))
    assert lag(version, current, tree.get) == tree[current][1] - max(tree[v][1] for v in common)
    assert in_lineage(version, current, tree.get) == (version in ancestors(tree, current))


def test_an_unknown_version_has_no_lag() -> None:
    assert lag(7, 0, {0: (None, 0)}.get) is None
    assert not in_lineage(7, 0, {0: (None, 0)}.get)
