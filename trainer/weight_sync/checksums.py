"""What an engine's checker should say after a push: sha256 by Hugging Face name, or SGLang's hashes of its fused, sharded tensors.

In the flow: push.py feeds every bucket's tensors while it sends them, and compares at the end. SGLang's layout is read from 0.5.21: q, k
and v lie in one tensor, and gate and up; each tensor-parallel rank holds its part of the rows, of o_proj and down_proj its part of the
columns; the vocabulary is padded with zeros, on a CPU the feed-forward's width too. On a CPU it hashes a tensor to the first 8 bytes of
its sha256. Its experts lie in tensors of a whole layer, whose layout depends on the kernel that runs them: they are not compared there.
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
_BY_COLUMNS: Final = ("o_proj.weight", "down_proj.weight", "o_proj.weight_scale_inv", "down_proj.weight_scale_inv")
_VOCABULARY: Final = ("embed_tokens.weight", "lm_head.weight")
_VOCAB_PADDING: Final = 64  # SGLang's DEFAULT_VOCAB_PADDING_SIZE
_FEED_FORWARD_MULTIPLE: Final = 32  # of a rank's part on a CPU (srt/configs/update_config.py)


def sha256(tensors: Iterable[torch.Tensor]) -> str:
    """Hex digest of the bytes of tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class PlainChecksums:
    """sha256 of every tensor, by its Hugging Face name: the embedded engine's naming, and what a publish is stamped with."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one full tensor."""
        self.found[name] = sha256([tensor])


class FusedChecksums:
    """What each tensor-parallel rank of an SGLang server should answer: `found[rank][name]`, complete once all parts were added."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.found: list[dict[str, str]] = [{} for _ in range(size)]
        self._parts: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one full tensor."""
        if _EXPERTS in name:
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

    def _enter(self, name: str, tensors: list[torch.Tensor]) -> None:
        for rank, found in enumerate(self.found):
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
        expected = self._fused[engine.facts.tensor].found
        for rank in _ranks(answer):
            _compare(engine.url, expected[rank["parallelism_info"][0]["tp_rank"]], rank["checksums"])
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
