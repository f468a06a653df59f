"""One learner rank as a process: builds the Learner, then runs the methods that the driver names, in order.

`python -m rlagent.trainer.rank FD PARENT_PID`, started by rlagent.launch.local. Rank 0 also pushes weights to the engines.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlagent.errors import RlagentError
from rlagent.launch.child import adopt_connection
from rlagent.launch.local import Failure, RankSpec
from rlagent.trainer.learner import Learner
from rlagent.trainer.weight_sync import PushReport, WeightSync
from rlagent.types import Batch


class Rank:
    """What the driver can call on every rank. Each method runs on all ranks in the same order."""

    def __init__(self, spec: RankSpec) -> None:
        torch.set_num_threads(spec.learner.threads)
        self.learner = Learner(
            spec.learner,
            spec.parallel,
            spec.model_dir,
            rank=spec.rank,
            world_size=spec.parallel.world_size,
            master_port=spec.master_port,
            seed=spec.seed,
            total_steps=spec.total_steps,
        )
        engine_dtype = getattr(torch, spec.engine_dtype)
        self.sync = (
            WeightSync(spec.sync, engine_dtype=engine_dtype, model_dir=spec.model_dir) if spec.rank == 0 else None
        )

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One learner step; metrics are the same on all ranks."""
        return self.learner.train_step(batch)

    def publish(self, engines: Sequence[str], version: int, until: float) -> PushReport | None:
        """Push the current weights to all engines, before `until` (time.monotonic()). Other ranks take part in the gathering only."""
        weights = self.learner.export_weights()  # the push casts: float8 blocks are made of what the learner holds
        if self.sync is None:
            for _ in weights:
                pass
            return None
        try:
            return self.sync.push(engines, weights, version=version, until=until)
        finally:
            for _ in weights:  # a push that failed midway: the other ranks still stand in the gather
                pass

    def save(self, directory: Path, extra: dict[str, Any], wait: bool) -> None:
        """Write a checkpoint: model, optimizer, schedule, RNG, and `extra` (JSON); without `wait` beside the training."""
        self.learner.save(directory, extra, wait=wait)

    def finish_save(self, wait: bool) -> Path | None:
        """The checkpoint that became whole now, if one did."""
        return self.learner.finish_save(wait=wait)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore a checkpoint; answers its `extra`."""
        return self.learner.load(directory)

    def save_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory."""
        self.learner.save_hf(directory)

    def close(self) -> None:
        """Leave the process groups."""
        if self.sync is not None:
            self.sync.close()
        self.learner.close()


def main(argv: list[str]) -> None:
    """Answer calls until the driver closes the pipe."""
    connection = adopt_connection(argv)
    rank: Rank | None = None
    try:
        while True:
            message = connection.recv()
            try:
                if rank is None:
                    rank, answer = Rank(message), None
                else:
                    method, args = message
                    answer = getattr(rank, method)(*args)
            except Exception as error:  # the boundary of the process: the driver decides what a failure means
                traceback.print_exc()
                ours = isinstance(error, RlagentError)  # which says all in its message
                answer = Failure(type(error).__name__, str(error), "" if ours else traceback.format_exc())
            connection.send(answer)
    except EOFError:
        if rank is not None:
            rank.close()


if __name__ == "__main__":
    main(sys.argv)
