"""Learners in several processes, cut by tensors, stages and experts, push what they trained into real SGLang.

What the server holds afterwards, its fused experts included, and what it says, are those of a load from the directory that the same
learner wrote.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from learner_pushes import pause, post, told
from learner_ranks import launch
from sglang_process import running_sglang
from tiny_models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


class Family(NamedTuple):
    """A model, and the learners that push it: processes, then the axes of each and its transport."""

    name: str
    layers: int
    pushes: dict[int, list[tuple[dict[str, int], str]]]


DENSE = Family(
    "qwen3", 4,
    {2: [({"pipeline": 2}, "tensor"), ({"tensor": 2}, "distributed"), ({"pipeline": 2, "virtual_pipeline": 2}, "delta")]},
)  # fmt: skip
MIXTURE = Family(
    "qwen3_moe", 3,
    {
        2: [({"data": 2, "expert": 2}, "tensor"), ({"tensor": 2, "sequence": True, "expert": 2}, "distributed")],
        4: [({"pipeline": 2, "data": 2, "expert": 2}, "disk")],
    },
)  # fmt: skip


@pytest.fixture(scope="module", params=[DENSE, MIXTURE], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(family.name) / "model"
    whole: dict[str, Any] = {"mlp_only_layers": []} if family is MIXTURE else {}  # SGLang makes every layer a mixture
    make_model(family.name, directory, tied=False, layers=family.layers, **whole)
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[str]:
    with running_sglang(model, "--skip-tokenizer-init") as url:
        yield url


def loaded(url: str, directory: Path) -> dict[str, Any]:
    pause(url)
    post(url, "/update_weights_from_disk", model_path=str(directory), flush_cache=False)
    return told(url)


def test_a_push_from_every_layout_is_a_load_from_disk(family: Family, engine: str, model: Path, tmp_path: Path) -> None:
    started = told(engine)
    layouts: list[dict[str, Any]] = []
    for world, pushes in family.pushes.items():
        first = len(layouts) + 1
        layouts += [
            {"axes": axes, "engine": engine, "transport": transport, "version": version}
            for version, (axes, transport) in enumerate(pushes, start=first)
        ]
        launch("learner_pushes.py", world, layouts[first - 1 :], model, tmp_path)
    assert loaded(engine, model) == started
    for layout in layouts:
        pushed = json.loads((tmp_path / f"{layout['version']}.json").read_text())
        assert pushed["said"] != started["said"]
        same = [name for name, digest in started["checksums"].items() if pushed["checksums"][name] == digest]
        assert all("rotary" in name for name in same), f"{layout}: {same} were not pushed"
        assert loaded(engine, tmp_path / str(layout["version"])) == pushed, layout
