"""Learners in several processes, cut by tensors, stages and experts, push what they trained into both kinds of engine.

What an engine holds afterwards, fused experts of SGLang included, and what it says, are those of a load from the directory that the
same learner wrote.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import running_engine
from learner_ranks import launch
from sglang_process import running_sglang
from tiny_models import make_model

pytestmark = pytest.mark.slow
PROMPT = [3, 4, 5, 6, 7, 8]
# By model: learners' axes and the transport of each.
PUSHES: dict[str, list[tuple[dict[str, int], str]]] = {
    "qwen3": [
        ({"pipeline": 2}, "tensor"),
        ({"tensor": 2}, "distributed"),
        ({"pipeline": 2, "virtual_pipeline": 2}, "delta"),
    ],
    "qwen3_moe": [
        ({"data": 2, "expert": 2}, "tensor"),
        ({"tensor": 2, "sequence": True, "expert": 2}, "distributed"),
        ({"pipeline": 2, "data": 2, "expert": 2}, "disk"),
    ],
}


@pytest.fixture(scope="module", params=list(PUSHES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Its family and its directory; four layers, so that stages can be cut again."""
    directory = tmp_path_factory.mktemp(request.param) / "model"
    make_model(request.param, directory, tied=False, layers=4)
    return request.param, directory


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine(request: pytest.FixtureRequest, model: tuple[str, Path]) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "sglang":
            yield stack.enter_context(running_sglang(model[1], "--skip-tokenizer-init"))
        else:
            yield stack.enter_context(running_engine(model[1], "--max-running", "4", "--max-total-tokens", "1024"))


def post(url: str, path: str, **body: object) -> Any:
    response = httpx.post(url + path, json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json() if response.content.startswith(b"{") else None


def pause(url: str) -> None:
    post(url, "/pause_generation", mode="abort")
    post(url, "/flush_cache")


def checksums(url: str) -> dict[str, str]:
    answer = post(url, "/weights_checker", action="checksum")
    found: dict[str, str] = answer.get("checksums") or answer["ranks"][0]["checksums"]
    return found


def said(url: str) -> list[list[float]]:
    post(url, "/continue_generation")
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = post(url, "/generate", input_ids=PROMPT, return_logprob=True, sampling_params=params)
    return [entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]]


def load(url: str, directory: Path) -> None:
    pause(url)
    post(url, "/update_weights_from_disk", model_path=str(directory), flush_cache=False)


def test_a_push_from_every_layout_is_a_load_from_disk(engine: str, model: tuple[str, Path], tmp_path: Path) -> None:
    family, directory = model
    before, old = checksums(engine), said(engine)
    for version, (axes, transport) in enumerate(PUSHES[family], start=1):
        pause(engine)
        world = axes.get("tensor", 1) * axes.get("pipeline", 1) * axes.get("data", 1)
        push = {"axes": axes, "engine": engine, "transport": transport, "version": version}
        launch("learner_pushes.py", world, [push], directory, tmp_path)
        pushed, new = checksums(engine), said(engine)
        assert not before.items() & pushed.items() - unchanged(before), f"{axes}: a tensor was not pushed"
        assert new != old
        load(engine, directory)
        assert (checksums(engine), said(engine)) == (before, old)
        load(engine, tmp_path / str(version))
        assert (checksums(engine), said(engine)) == (pushed, new), f"{axes} by {transport}"


def unchanged(checksums: dict[str, str]) -> set[tuple[str, str]]:
    """What training leaves alone: SGLang's checker also tells of the tables of its rotary embeddings."""
    return {item for item in checksums.items() if "rotary" in item[0]}
