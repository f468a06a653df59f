"""The engine's forward against transformers: three families, RoPE scaling, prompts in pieces, decoding in gathered rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import widen_context
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA3_ROPE, VOCAB, make_model

from rlagent.engine.architecture import Architecture, inverse_frequencies
from rlagent.engine.cache import KVCache
from rlagent.engine.checkpoint import load_checkpoint
from rlagent.engine.model import Chunk, Model
from rlagent.errors import LoadError

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")
CPU = torch.device("cpu")


def load(directory: Path) -> tuple[Model, KVCache]:
    architecture = Architecture.load(directory)
    model = Model(architecture, dtype=torch.float32, device=CPU)
    load_checkpoint(model, directory)
    return model, KVCache(architecture, max_running=40, max_total_tokens=40 * 512, dtype=torch.float32, device=CPU)


def forward(model: Model, cache: KVCache, ids: dict[int, list[int]], chunks: list[Chunk], decode: list[int]) -> Any:
    """Logits of all tokens of the chunks, then of the last id of each decoding row."""
    tokens = [t for c in chunks for t in ids[c.row][c.start : c.end]] + [ids[row][-1] for row in decode]
    last = list(range(len(tokens)))
    return model.forward(tokens, cache, chunks, [(row, len(ids[row]) - 1) for row in decode], last)


def expected(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    """Two prompts in pieces of odd sizes, a third decoded from its first token on, all in the same forwards."""
    reference = make_model(family, tmp_path, tied=tied).eval()
    model, cache = load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    ids = {row: torch.randint(0, VOCAB, (n,), generator=generator).tolist() for row, n in ((0, 40), (1, 31), (2, 4))}
    cuts = {0: (0, 1, 17, 38, 40), 1: (0, 13, 14, 30, 31)}
    found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for step in range(4):
        chunks = [Chunk(row=row, start=cuts[row][step], end=cuts[row][step + 1]) for row in (0, 1)]
        logits = forward(model, cache, {**ids, 2: ids[2][: step + 1]}, chunks, [2])
        sizes = [*(c.end - c.start for c in chunks), 1]
        for row, part in enumerate(logits.split(sizes)):
            found[row].append(part)
    for row, parts in found.items():
        torch.testing.assert_close(torch.cat(parts), expected(reference, ids[row]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "rows", [[0, 1, 2], [0, 2], [1], [1, 2, 3], list(range(40)), [*range(3, 20), 21, *range(30, 38)]]
)
def test_any_rows_decode_together(tmp_path: Path, rows: list[int]) -> None:
    reference = make_model("qwen3", tmp_path).eval()
    model, cache = load(tmp_path)
    ids = {row: [(7 * row + i * i) % VOCAB for i in range(5 + 19 * row % 90)] for row in range(40)}
    forward(model, cache, ids, [Chunk(row=row, start=0, end=len(ids[row]) - 1) for row in ids], [])
    logits = forward(model, cache, ids, [], rows)
    for row, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(found, expected(reference, ids[row])[-1], rtol=1e-5, atol=1e-5)


def test_llama3_rope_at_positions_far_beyond_the_original_context(tmp_path: Path) -> None:
    """With a base of 10, two of the four wavelengths lie between the scaled ones and the others."""
    make_model("llama", tmp_path)
    widen_context(tmp_path, 400)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10.0}})
    )
    reference = type(make_model("llama", tmp_path / "short")).from_pretrained(tmp_path).eval()
    model, cache = load(tmp_path)
    cache.grow(400)
    ids = [(i * i + 3 * i) % VOCAB for i in range(400)]  # 32 of them lie in the original context
    logits = forward(model, cache, {0: ids}, [Chunk(row=0, start=0, end=400)], [])
    torch.testing.assert_close(logits, expected(reference, ids), rtol=1e-5, atol=2e-5)


def test_rope_by_its_old_names_in_the_config(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    modern = inverse_frequencies(Architecture.load(tmp_path))
    scaling = {"type" if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_theta": LLAMA3_ROPE["rope_theta"], "rope_scaling": scaling}))
    assert inverse_frequencies(Architecture.load(tmp_path)).equal(modern)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_by_their_hugging_face_names(tmp_path: Path, family: str, tied: bool) -> None:
    make_model(family, tmp_path, tied=tied)
    model, _ = load(tmp_path)
    named = model.parameters_by_name()
    state = load_file(tmp_path / "model.safetensors")
    assert set(named) == set(state)
    assert all(named[name].equal(state[name]) for name in named)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "'?'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_config_the_engine_does_not_run_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    make_model("qwen3", tmp_path)
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(LoadError, match=r"config\.json") as error:
        Architecture.load(tmp_path)
    assert words in str(error.value)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json"):
        Architecture.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="not valid JSON"):
        Architecture.load(tmp_path)


def test_a_tied_head_that_the_checkpoint_stores_is_left_out(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    model, _ = load(tmp_path)
    assert model.head is model.embedding
    assert model.embedding.equal(weights["model.embed_tokens.weight"])
