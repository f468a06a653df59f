"""The broadcast transport: a process group of the learner's rank 0 and all engines, beside torch.distributed's default one.

Invariant: a member that dies holds nobody up. The learner hears of it by the engine's HTTP answer, and then breaks the group, so that
the engines that wait in it are free for the next command.
"""

import threading
from concurrent.futures import Future, as_completed
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from rlagent.errors import WeightSyncError
from rlagent.kernels.quantize import FLOAT8
from rlagent.trainer.weight_sync.buckets import Bucket
from rlagent.trainer.weight_sync.engine_api import EngineSet, refuse_replicas

_HOST: Final = "127.0.0.1"  # learner and engines share the machine
_JOIN: Final = timedelta(
    seconds=30
)  # paused engines join at once; so long waits a group of which a member died before it joined
_BROADCAST: Final = timedelta(seconds=60)  # of one tensor
_LEAVE_S: Final = 10.0


class DistributedTransport:
    """Broadcasts tensor by tensor: gloo on a CPU, NCCL on GPUs. The group is kept between pushes to the same engines."""

    by_disk = False

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._name = ""

    def send(self, engines: EngineSet, bucket: Bucket) -> None:
        """One HTTP call announces the tensors; each is then broadcast in the same order."""
        if self._group is None:
            self._group = self._join(engines, "nccl" if bucket.flat.is_cuda else "gloo")
        body = {
            "names": [slot.name for slot in bucket.slots],
            "dtypes": [str(slot.dtype).removeprefix("torch.") for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
            "group_name": self._name,
            "flush_cache": False,
        }
        answers = [engines.submit(engine.post, "/update_weights_from_distributed", body) for engine in engines.engines]
        sending: list[Any] = []
        try:
            for slot in bucket.slots:
                tensor = bucket.tensor(slot)
                if tensor.dtype == FLOAT8 and not tensor.is_cuda:
                    tensor = tensor.view(torch.uint8)  # gloo knows no float8
                sending.append(dist.broadcast(tensor, group=self._group, group_src=0, async_op=True))
            # An engine answers when it has all, or when it refuses: then nobody would take the broadcast.
            for answer in as_completed(answers):
                answer.result()
            while sending:
                sending.pop(0).wait()
            return
        except RuntimeError as error:
            reason = str(error)
        finally:
            sending.clear()  # each holds the group, and the frames of an error would hold them
        raise WeightSyncError(f"the broadcast to engines {', '.join(engines.urls)} failed: {reason}")

    def finish(self, engines: EngineSet, version: int) -> None:
        """Nothing is left to do."""

    def abandon(self) -> None:
        """Break the group. Its connections close, and with them every wait in it, when the last reference to it goes."""
        if self._group is not None:
            # Aside: it waits for broadcasts that somebody alive does not take, up to their time.
            threading.Thread(target=_destroy, args=(self._group,), name="weight-sync-break").start()
            self._group = None

    def disconnect(self, engines: EngineSet) -> None:
        """Have the engines leave the group, then leave it."""
        if self._group is None:
            return
        leaving = [
            engines.submit(engine.post, "/destroy_weights_update_group", {"group_name": self._name}, _LEAVE_S)
            for engine in engines.engines
        ]
        for left in leaving:
            with suppress(WeightSyncError):  # one that is gone need not leave
                left.result()
        _destroy(self._group)
        self._group = None

    def close(self) -> None:
        """The group went with its engines."""

    def _join(self, engines: EngineSet, backend: str) -> dist.ProcessGroup:
        """A new group with these engines. Its name is new too: an engine may hold a broken one."""
        self._name = f"rlagent-weights-{uuid4().hex}"
        for engine in engines.engines:
            refuse_replicas(engine)
        ranks = [engine.facts.tensor for engine in engines.engines]
        world_size = 1 + sum(ranks)
        store = TCPStore(_HOST, 0, world_size, is_master=True, timeout=_JOIN, wait_for_workers=False)
        joining: list[Future[Any]] = []
        for index, engine in enumerate(engines.engines):
            body = {
                "master_address": _HOST,
                "master_port": store.port,
                "rank_offset": 1 + sum(ranks[:index]),
                "world_size": world_size,
                "group_name": self._name,
                "backend": backend,
            }
            joining.append(engines.submit(engine.post, "/init_weights_update_group", body))
        own = engines.submit(_make_group, self._name, store, world_size, backend)
        del store  # it is the group's alone: when that is given up, engines that wait at it are sent away
        for done in as_completed([*joining, own]):
            done.result()  # an engine that refuses ends the wait for it
        return own.result()


def _destroy(group: dist.ProcessGroup) -> None:
    dist.destroy_process_group(group)


def _make_group(name: str, store: TCPStore, world_size: int, backend: str) -> dist.ProcessGroup:
    """This process as rank 0 of the group."""
    try:
        group, _ = c10d._new_process_group_helper(
            world_size, 0, [], c10d.Backend(backend), c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name), timeout=_JOIN,
        )  # fmt: skip
    except RuntimeError as error:
        reason = str(error)
    else:
        group.set_timeout(_BROADCAST)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        found: dist.ProcessGroup = group
        return found
    del store
    # Out here and without the original, whose frames would keep the store, and the engines that wait at it.
    raise WeightSyncError(f"no weight update group with the engines: {reason}")
