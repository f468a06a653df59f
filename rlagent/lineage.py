"""The learner's weights through a run: restored, sent to the engines as versions, written as checkpoints.

The loop (loop.py) says when; what a checkpoint holds and what may be deleted is decided here.
Invariant: a checkpoint holds the weights, the number of the last consumption that made them, and the policy version that
served them; so a resume trains on every batch exactly once in the lineage of its weights.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlagent.buffer.leases import RestoreReport
from rlagent.client import PublishTicket, RouterClient
from rlagent.config import Config
from rlagent.errors import RlagentError
from rlagent.launch.local import LocalRanks
from rlagent.run_directory import RunDirectory


@dataclass(kw_only=True, slots=True)
class Position:
    """Where the loop stands: what a checkpoint stores beside the learner's own state."""

    step: int = 0  # learner steps done
    cursor: int = 0  # the last consumption trained on
    version: int = 0  # the policy version that holds these weights
    snapshot: str | None = None
    draw: dict[str, Any] = field(default_factory=dict)  # what is known of the tasks


class Lineage:
    """The position of one run and what is made durable of it. Without ranks (`--rollout-only`) nothing is."""

    def __init__(self, config: Config, run: RunDirectory, client: RouterClient, ranks: LocalRanks | None) -> None:
        self.position = Position()
        self._config = config
        self._run = run
        self._client = client
        self._ranks = ranks
        self._saving = False  # a checkpoint is being written beside the steps
        self._begun: PublishTicket | None = None  # the next publish, whose engines have lent their memory

    async def restore(self) -> RestoreReport:
        """Learner and buffer as of the newest checkpoint; what was consumed after it is delivered again."""
        checkpoint = self._run.newest_checkpoint()
        if checkpoint is not None and self._ranks is not None:
            self.position = Position(**await self._ranks.call("load", checkpoint))
        return await self._client.restore(cursor=self.position.cursor, version=self.position.version)

    async def make_room(self) -> None:
        """Before a step, where sync.release_kv_cache: the next publish begins, and engines lend their memory until it is committed. Its
        lease brings them back if this process dies.
        """
        if self._config.sync.release_kv_cache:
            self._begun = await self._client.begin_publish(
                step=self.position.step + 1, parent=self.position.version, release_kv_cache=True
            )

    async def publish(self, *, parent: int, same_weights: bool = False) -> None:
        """Send the learner's weights to every engine as a new version; a full snapshot every K publishes."""
        if self._ranks is None:
            return
        ticket, self._begun = self._begun, None
        if ticket is None:
            ticket = await self._client.begin_publish(step=self.position.step, parent=parent, same_weights=same_weights)
        try:
            report = await self._ranks.call("publish", ticket.engines, ticket.version, ticket.until)
            due = ticket.version % self._config.sync.snapshot_every == 0
            snapshot = await self._write_snapshot(self._ranks, ticket.version) if due else None
            await self._client.commit_publish(ticket.publish_id, checksum=report.checksum, snapshot=snapshot)
        except RlagentError as error:
            await self._client.fail_publish(ticket.publish_id, str(error))
            raise
        self.position.version = ticket.version
        self.position.snapshot = snapshot or self.position.snapshot

    async def _write_snapshot(self, ranks: LocalRanks, version: int) -> str:
        directory = self._run.snapshot(version)
        await ranks.call("save_hf", directory)
        return str(directory.absolute())

    async def save(self) -> None:
        """A checkpoint of this step, unless there is one; by `checkpoint.asynchronous` it is written beside the next steps."""
        if self._ranks is None:
            return
        checkpoint = self._run.checkpoint(self.position.step)
        if not checkpoint.exists():
            await self.finish_save(wait=True)
            asynchronous = self._config.checkpoint.asynchronous
            await self._ranks.call("save", checkpoint, asdict(self.position), not asynchronous)
            self._saving = asynchronous
        if not self._saving:
            self._prune()

    async def finish_save(self, *, wait: bool) -> None:
        """Give the save that is being written its name, once it is on disk; only then may older ones go."""
        if self._saving and self._ranks is not None and await self._ranks.call("finish_save", wait) is not None:
            self._saving = False
            self._prune()

    def _prune(self) -> None:
        kept = set() if self.position.snapshot is None else {Path(self.position.snapshot)}
        self._run.prune(keep=self._config.checkpoint.keep, snapshots=kept)
