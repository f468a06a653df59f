"""Which recorded batches make a step again."""

from groups import group

from rlagent.buffer.history import Consumption
from rlagent.gather import gather, useful
from rlagent.replay import by_step
from rlagent.types import Group, Lease


def test_a_step_is_all_that_was_consumed_in_it() -> None:
    history = [Consumption(number=n, batch=n, step=step) for n, step in ((1, 0), (2, 0), (5, 1), (6, 2), (7, 2))]
    assert [[each.number for each in step] for step in by_step(history)] == [[1, 2], [5], [6, 7]]
    assert by_step([]) == []


async def test_what_is_useful_of_a_steps_leases_is_what_was_gathered() -> None:
    queue: list[Group] = [group(rewards, name=f"g{n}") for n, rewards in enumerate(([1, 1], [0, 1], [0, 0], [1, 0]))]

    async def lease(num_groups: int) -> Lease:
        taken = [queue.pop(0) for _ in range(num_groups)]
        return Lease(lease_id=taken[0].group_id, step=0, groups=tuple(taken), expires_at=0.0)

    found = await gather(lease, 2, refill=4, dropped=lambda _: None)
    assert found is not None
    assert len(found.leases) == 3
    again = useful((each for one in found.leases for each in one.groups), refill=4)
    assert [each.group_id for each in again] == [each.group_id for each in found.groups] == ["g1", "g3"]
