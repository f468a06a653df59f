"""Dynamic sampling: groups without variance are left out and replaced, and every lease is the step's."""

from groups import group

from rlagent.gather import Gathered, gather
from rlagent.types import Group, Lease

FLAT, VARIED = [1.0, 1.0], [1.0, 0.0]


class Queue:
    """Gives out groups in order."""

    def __init__(self, rewards: list[list[float]]) -> None:
        self.groups = [group(each, name=f"g{number}") for number, each in enumerate(rewards)]
        self.asked: list[int] = []
        self.room: list[int] = []

    async def lease(self, num_groups: int) -> Lease | None:
        self.asked.append(num_groups)
        if len(self.groups) < num_groups:
            return None
        taken, self.groups = self.groups[:num_groups], self.groups[num_groups:]
        return Lease(lease_id=f"l{len(self.asked)}", step=0, groups=tuple(taken), expires_at=0.0)


def names(groups: tuple[Group, ...]) -> list[str]:
    return [each.group_id for each in groups]


async def gathered(queue: Queue, num_groups: int, refill: int) -> Gathered | None:
    return await gather(queue.lease, num_groups, refill=refill, dropped=queue.room.append)


async def test_without_refill_a_step_is_one_lease_whatever_it_holds() -> None:
    queue = Queue([FLAT, VARIED])
    found = await gathered(queue, 2, 0)
    assert found is not None
    assert (names(found.groups), found.num_flat, queue.asked, queue.room) == (["g0", "g1"], 0, [2], [])


async def test_flat_groups_are_replaced_until_the_step_is_full() -> None:
    queue = Queue([FLAT, VARIED, FLAT, FLAT, VARIED, VARIED, VARIED])
    found = await gathered(queue, 3, 100)
    assert found is not None
    assert names(found.groups) == ["g1", "g4", "g5"]
    assert [names(lease.groups) for lease in found.leases] == [["g0", "g1", "g2"], ["g3", "g4"], ["g5"]]
    assert (found.num_flat, queue.room) == (3, [2, 1])


async def test_no_more_than_refill_groups_are_asked_for() -> None:
    queue = Queue([FLAT] * 9)
    found = await gathered(queue, 3, 4)
    assert found is not None
    assert (names(found.groups), queue.asked, found.num_flat) == ([], [3, 3, 1], 7)


async def test_a_run_that_is_to_end_gathers_nothing() -> None:
    assert await gathered(Queue([FLAT, FLAT]), 2, 1) is None


async def test_bundles_that_name_no_group_are_kept() -> None:
    queue = Queue([])
    queue.groups = [group([1.0], ungrouped=True)]
    found = await gathered(queue, 1, 1)
    assert found is not None
    assert found.num_flat == 0
