"""What a long wait says: how far the groups are, and why finished work is not trained on."""

from pathlib import Path

from rlagent.buffer.ledger import LedgerEntry
from rlagent.buffer.status import BufferStatus
from rlagent.config import Config
from rlagent.display import Display
from rlagent.run_directory import RunDirectory
from rlagent.told import Told


class Heard(Display):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def status(*ledger: LedgerEntry) -> BufferStatus:
    return BufferStatus(
        backlog=1, leased=0, redelivery=0, running=0, running_trained=0, waiting=3, incomplete=(), ledger=ledger,
        cursor=0, version=2, depth=2, step=2, newest_version=2, newest_group=None,
    )  # fmt: skip


def test_a_wait_names_engines_failures_and_all_that_was_left_out(tmp_path: Path) -> None:
    heard = Heard()
    told = Told(heard, RunDirectory.create(Config.model_validate({"run": {"dir": tmp_path / "run"}})))
    policy = {"engines": [{"url": "http://e", "state": "ready"}]}
    told.awaited(2, status(), policy, {})
    told.awaited(
        2,
        status(
            LedgerEntry(event="group_dropped", reason="stale", count=9),
            LedgerEntry(event="rollout_dropped", reason="no_reward", count=4),
        ),
        policy,
        {"error": 1},
    )
    plain, full = heard.said
    assert plain == (
        "waiting for 2 groups: 1 are complete, 0 under way; 3 finished sessions without a group, no full bundle yet; "
        "engines: http://e ready"
    )
    assert full == (
        plain + "; failed: 1 error; rollouts left out: 4 no_reward; groups left out: 9 stale (stale: older than "
        "buffer.max_staleness allows)"
    )
