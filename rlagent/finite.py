"""Numbers that JSON cannot hold and no setting means: found by name in plain trees, before they go anywhere."""

import math
from collections.abc import Iterator, Mapping


def not_finite(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Each inf and nan of a tree of mappings and sequences, by its dotted name.

    >>> list(not_finite({"reward": {"correct": float("nan")}, "calls": [1.0, float("inf")]}))
    [('reward.correct', nan), ('calls[1]', inf)]
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from not_finite(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from not_finite(inner, f"{name}[{place}]")
