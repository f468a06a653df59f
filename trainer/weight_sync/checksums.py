"""What an engine's checker should say after a push: sha256 by Hugging Face name, or SGLang's hashes of its fused, sharded tensors.

In the flow: push.py feeds every bucket's tensors while it sends them, and compares at the end. SGLang's layout is read from 0.5.21: q, k
and v lie in one tensor, and gate and up; each tensor-parallel rank holds its part of the rows, of o_proj and down_proj its part of the
columns; the vocabulary is padded with zeros, on a CPU the feed-forward's width too. A layer's experts lie in two tensors, one after the
other: w13 (gate over up of each, cut by rows) and w2 (down, cut by columns); so they do wherever checksums are compared, which is on a
CPU, not where kernels of GPUs lay them out anew. On a CPU it hashes a tensor to the first 8 bytes of its sha256.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from rlagent.errors import WeightSyncError
from rlagent.trainer.weight_sync.engine_api import EngineApi, EngineFacts

_FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_INTO: Final = {part: whole for whole, parts in _FUSED.items() for part in parts}
_EXPERTS: Final = ".mlp.experts."
# Of an expert's matrix: which tensor of the layer holds it, its place among those of one expert there, and how many those are.
_STACKED: Final = {"gate_proj": ("w13", 0, 2), "up_proj": ("w13", 1, 2), "down_proj": ("w2", 0, 1)}
_BY_COLUMNS: Final = ("o_proj.weight", "down_proj.weight", "o_proj.weight_scale_inv", "down_proj.weight_scale_inv")
_VOCABULARY: Final = ("embed_tokens.weight", "lm_head.weight")
_VOCAB_PADDING: Final = 64  # SGLang's DEFAULT_VOCAB_PADDING_SIZE
_FEED_FORWARD_MULTIPLE: Final = 32  # of a rank's part on a CPU (srt/configs/update_config.py)


def sha256(tensors: Iterable[torch.Tensor]) -> str:
    """Hex digest of the bytes of tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return data


class PlainChecksums:
    """sha256 of every tensor, by its Hugging Face name: the embedded engine's naming, and what a publish is stamped with."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one full tensor."""
        self.found[name] = sha256([tensor])


class _Stack:
    """The hash of a tensor that is made of pieces, which are taken as they come and kept only until those before them are in."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._waiting: dict[int, torch.Tensor] = {}
        self._next = 0

    def add(self, place: int, piece: torch.Tensor) -> None:
        """Take the piece at a place, from 0."""
        self._waiting[place] = piece
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._digest.update(_bytes(ready))
            self._next += 1

    def hexdigest(self) -> str:
        """Of all pieces; they must have come without a gap."""
        assert not self._waiting, f"piece {self._next} is missing"
        return self._digest.hexdigest()


class FusedChecksums:
    """What each tensor-parallel rank of an SGLang server should answer: `of_rank`, complete once all parts were added."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._found: list[dict[str, str]] = [{} for _ in range(size)]
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._stacks: list[dict[str, _Stack]] = [{} for _ in range(size)]

    def of_rank(self, rank: int) -> dict[str, str]:
        """By the engine's names."""
        return self._found[rank] | {name: stack.hexdigest()[:16] for name, stack in self._stacks[rank].items()}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one full tensor."""
        if _EXPERTS in name:
            self._stack(name, tensor)
            return
        prefix, _, kind = name.rpartition("_proj.")
        part = prefix.rpartition(".")[2] + "_proj"
        if part in _FUSED_INTO:
            whole = _FUSED_INTO[part]
            fused = f"{prefix.rpartition('.')[0]}.{whole}.{kind}"
            parts = self._parts.setdefault(fused, {})
            parts[part] = tensor
            if len(parts) == len(_FUSED[whole]):
                self._enter(fused, [parts[each] for each in _FUSED[whole]])
                del self._parts[fused]
        else:
            self._enter(name, [tensor])

    def _stack(self, name: str, tensor: torch.Tensor) -> None:
        """A matrix of one expert, as model.layers.0.mlp.experts.7.gate_proj.weight."""
        layer, _, rest = name.partition(_EXPERTS)
        expert, part, kind = rest.split(".")
        whole, place, each = _STACKED[part]
        axis = 1 if part == "down_proj" else 0
        whole_width = _filled(tensor, axis, self.size * _FEED_FORWARD_MULTIPLE) if kind == "weight" else tensor
        for rank, stacks in enumerate(self._stacks):
            stack = stacks.setdefault(f"{layer}{_EXPERTS}{whole}_{kind}", _Stack())
            stack.add(int(expert) * each + place, whole_width.chunk(self.size, dim=axis)[rank])

    def _enter(self, name: str, tensors: list[torch.Tensor]) -> None:
        for rank, found in enumerate(self._found):
            found[name] = sha256([self._shard(name, tensor, rank) for tensor in tensors])[:16]

    def _shard(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if name.endswith(_VOCABULARY):
            return _vocab_shard(tensor, self.size, rank)
        if name.endswith("gate_up_proj.weight"):
            return _filled(tensor, 0, self.size * _FEED_FORWARD_MULTIPLE).chunk(self.size)[rank]
        if name.endswith("down_proj.weight"):
            return _filled(tensor, 1, self.size * _FEED_FORWARD_MULTIPLE).chunk(self.size, dim=1)[rank]
        if name.endswith(_BY_COLUMNS):
            return tensor.chunk(self.size, dim=1)[rank]
        if "_proj." in name:
            return tensor.chunk(self.size)[rank]
        return tensor


def _filled(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """With zeros behind, to a multiple in one dimension."""
    shape = list(tensor.shape)
    shape[dim] = -shape[dim] % multiple
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def _vocab_shard(tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    padded = -(-len(tensor) // _VOCAB_PADDING) * _VOCAB_PADDING
    if padded % size:
        padded = -(-len(tensor) // (_VOCAB_PADDING * size)) * _VOCAB_PADDING * size
    whole = torch.cat((tensor, tensor.new_zeros(padded - len(tensor), *tensor.shape[1:])))
    return whole.chunk(size)[rank]


class Expected:
    """What all engines of a push should hold."""

    def __init__(self, facts: Iterable[EngineFacts]) -> None:
        self._plain = PlainChecksums()
        self._fused = {each.tensor: FusedChecksums(each.tensor) for each in facts if each.sglang}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one full tensor, in the engines' dtype."""
        self._plain.add(name, tensor)
        for fused in self._fused.values():
            fused.add(name, tensor)

    @property
    def digest(self) -> str:
        """One sha256 of the whole policy: over the tensors' checksums in the order they came."""
        return hashlib.sha256("".join(self._plain.found.values()).encode()).hexdigest()

    def compare(self, engine: EngineApi) -> str:
        """ "yes", or why it cannot be told; WeightSyncError when the engine holds something else."""
        if engine.facts.sglang and engine.facts.on_gpu:
            return f"engine {engine.url} hashes by a GPU kernel of SGLang's own, which is not compared"
        answer = engine.post("/weights_checker", {"action": "checksum"})
        if not engine.facts.sglang:
            _compare(engine.url, self._plain.found, answer.get("checksums", {}))
            return "yes"
        expected = self._fused[engine.facts.tensor]
        for rank in _ranks(answer):
            _compare(engine.url, expected.of_rank(rank["parallelism_info"][0]["tp_rank"]), rank["checksums"])
        return "yes"


def _ranks(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["ranks"]
    return found


def _compare(url: str, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    wrong = [name for name, digest in expected.items() if found.get(name) != digest]
    if wrong:
        raise WeightSyncError(
            f"engine {url} does not hold what was sent: {len(wrong)} of {len(expected)} tensors differ, first {wrong[0]!r}"
        )
