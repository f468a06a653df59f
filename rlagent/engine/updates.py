"""Weight updates: staged bucket by bucket, put in place all at once.

Between begin and end the tensors wait in a shadow; the model is untouched until `end`, so a learner that dies in mid-push leaves
the old weights whole. Invariant: the weights that generate are always those of one version.
"""

import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from rlagent.engine.checkpoint import check_names, load_checkpoint
from rlagent.engine.model import Model
from rlagent.engine.unpickle import read_bucket, split_bucket
from rlagent.errors import EngineError, LoadError
from rlagent.kernels.quantize import FLOAT8

_GROUP_TIMEOUT: Final = timedelta(minutes=5)  # a learner that died in mid-broadcast frees the engine after this


class WeightUpdates:
    """The engine's side of every transport. Called in the engine's thread, between steps."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._staged: dict[str, torch.Tensor] | None = None
        self._version: str | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}

    @property
    def open(self) -> bool:
        """Whether an update session is under way."""
        return self._staged is not None

    def begin(self) -> None:
        """Open a session; what an unfinished one staged is dropped."""
        self._staged, self._version = {}, None

    def from_tensor(self, payloads: list[object], load_format: str | None, version: str | None) -> None:
        """Stage one bucket of serialized tensors (one payload: there is no tensor parallelism here)."""
        if len(payloads) != 1:
            raise EngineError(f"serialized_named_tensors has {len(payloads)} entries; the embedded engine has one rank")
        self._stage(read_bucket(payloads[0], load_format), version)

    def from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str, load_format: str | None,
        version: str | None,
    ) -> None:  # fmt: skip
        """Receive tensors that rank 0 of a group broadcasts, one by one or as one flat buffer, and stage them."""
        if not len(names) == len(dtypes) == len(shapes):
            raise EngineError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not match")
        if group not in self._groups:
            raise EngineError(f"no weight update group {group!r}; call /init_weights_update_group first")
        process_group = self._groups[group]
        expected = {
            name: torch.empty(shape, dtype=_dtype(dtype), device=self._model.device)
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        }
        self._session()
        try:
            if load_format == "flattened_bucket":
                expected = _receive_flat(expected, process_group, self._model.device)
            else:
                for tensor in expected.values():
                    as_bytes = tensor.dtype == FLOAT8 and not tensor.is_cuda  # gloo knows no float8
                    dist.broadcast(tensor.view(torch.uint8) if as_bytes else tensor, group=process_group, group_src=0)
        except RuntimeError as error:  # what torch.distributed raises when a member is gone
            raise EngineError(f"the broadcast in group {group!r} broke off: {error}") from error
        self._stage(expected, version)

    def end(self) -> str | None:
        """Put everything staged in place; the version it was stamped with, None if it was not."""
        staged = self._session()
        self._model.load(staged)
        self._staged = None
        return self._version

    def from_disk(self, model_dir: Path) -> None:
        """Load a full checkpoint; drops what an unfinished session staged."""
        load_checkpoint(self._model, model_dir)
        self._staged = None

    def checksums(self) -> dict[str, str]:
        """sha256 of every tensor's bytes, by Hugging Face name, in the engine's dtype."""
        return {
            name: hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self._model.stored_by_name().items()
        }

    def join(self, group: str, *, host: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Join a broadcast group of its own (no default group is touched); blocks until all are there."""
        if group in self._groups:
            raise EngineError(f"weight update group {group!r} exists already; destroy it first")
        try:
            joined = join_group(group, host=host, port=port, rank=rank, world_size=world_size, backend=backend)
        except RuntimeError as error:
            raise EngineError(f"weight update group {group!r} at {host}:{port} cannot be joined: {error}") from error
        self._groups[group] = joined

    def leave(self, group: str) -> None:
        """Leave a group."""
        if group not in self._groups:
            raise EngineError(f"no weight update group {group!r}")
        dist.destroy_process_group(self._groups.pop(group))

    def _session(self) -> dict[str, torch.Tensor]:
        if self._staged is None:
            raise EngineError("no weight update is open; call /begin_weight_update first")
        return self._staged

    def _stage(self, tensors: dict[str, torch.Tensor], version: str | None) -> None:
        staged = self._session()
        try:
            check_names(self._model, tensors, complete=False, where="weight update")
        except LoadError as error:
            raise EngineError(str(error)) from error
        staged |= tensors
        if version is not None:
            self._version = version


def join_group(name: str, *, host: str, port: int, rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
    """A process group beside torch.distributed's default one, as SGLang's init_custom_process_group makes it."""
    store = c10d.PrefixStore(name, TCPStore(host, port, world_size, is_master=rank == 0))
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(backend), store, group_name=c10d.GroupName(name), timeout=_GROUP_TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    found: dist.ProcessGroup = group
    return found


def _receive_flat(
    expected: dict[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> dict[str, torch.Tensor]:
    """One broadcast of all tensors, one after the other, as bytes."""
    sizes = [tensor.nbytes for tensor in expected.values()]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(flat, group=group, group_src=0)
    pieces = flat.split(sizes)
    return {
        name: piece.clone().view(tensor.dtype).reshape(tensor.shape)
        for (name, tensor), piece in zip(expected.items(), pieces, strict=True)
    }


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise EngineError(f"dtype {name!r} is unknown")
    return found


__all__ = ["WeightUpdates", "join_group", "split_bucket"]
