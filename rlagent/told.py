"""What a run says beside its table: what a long wait waits for, and the first failure of each kind.

The loop (loop.py) notes what happened here; everything is kept in the run's directory, and what repeats is said once.
"""

from collections.abc import Mapping

from rlagent.buffer.status import BufferStatus
from rlagent.client import Json
from rlagent.display import Display
from rlagent.rollout import Outcome
from rlagent.run_directory import RunDirectory


def _left_out(status: BufferStatus, event: str) -> list[str]:
    return [f"{entry.count} {entry.reason}" for entry in status.ledger if entry.event == event]


class Told:
    """Says things to the display of one run."""

    def __init__(self, display: Display, run: RunDirectory) -> None:
        self._display = display
        self._run = run
        self._rollout_failed = False
        self._verifier_failed = False

    def awaited(self, num_groups: int, status: BufferStatus, policy: Json, failures: Mapping[str, int]) -> None:
        """A wait that is longer than one poll is explained: agents that do not come, or engines that are down."""
        engines = ", ".join(f"{engine['url']} {engine['state']}" for engine in policy["engines"])
        dropped = _left_out(status, "rollout_dropped")
        groups = _left_out(status, "group_dropped")
        failed = [f"{count} {how}" for how, count in failures.items()]
        said = [
            f"waiting for {num_groups} groups: {status.backlog} are complete, {len(status.incomplete)} under way",
            *([f"{status.waiting} finished sessions without a group, no full bundle yet"] if status.waiting else []),
            f"engines: {engines}",
            *([f"failed: {', '.join(failed)}"] if failed else []),
            *([f"rollouts left out: {', '.join(dropped)}"] if dropped else []),
            *(
                [f"groups left out: {', '.join(groups)} (stale: older than buffer.max_staleness allows)"]
                if groups
                else []
            ),
        ]
        self._display.say("; ".join(said))

    def rollout_failed(self, session_id: str, outcome: Outcome) -> None:
        """The first failure is shown, all of them are kept."""
        self._run.write_failure(session_id, outcome.status, outcome.error)
        if not self._rollout_failed:
            self._rollout_failed = True
            last = (outcome.error.strip().splitlines() or ["no reason was given"])[-1]
            self._display.console.print(
                f"a rollout failed ({outcome.status}): {last}; it counts as failed, and this and later ones are in "
                f"{self._run.failures}", highlight=False, soft_wrap=True, markup=False,
            )  # fmt: skip

    def verifiers_failed(self, failures: Mapping[str, int]) -> None:
        """The first time only; metrics.jsonl goes on counting."""
        found = [f"{count} {name}" for name, count in failures.items() if name.startswith("verifier_")]
        if found and not self._verifier_failed:
            self._verifier_failed = True
            self._display.say(
                f"verifiers failed ({', '.join(found)}): their components took the value of a failure; rollout/verifier_* of "
                f"metrics.jsonl counts them, {self._run.logs}/rollout-*.log says why"
            )
