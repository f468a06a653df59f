"""What a learner step trains on: one lease, or with dynamic sampling as many as it takes to fill the step.

In the flow: loop.py asks for a step's groups; those without variance in their rewards teach nothing and are left out (DAPO, arXiv
2503.14476, sec. 3.2). Invariant: every lease that was taken is consumed with the step, the groups left out included, so that a
resume is given the same leases and leaves out the same groups.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from rlagent.types import Group, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Leases of one step, and which of their groups are trained on."""

    leases: tuple[Lease, ...]
    groups: tuple[Group, ...]
    num_flat: int  # groups that were left out

    @property
    def lags(self) -> dict[int, int]:
        """By version of a token, how many publishes it lags behind."""
        return {version: lag for lease in self.leases for version, lag in lease.lags.items()}


def has_variance(group: Group) -> bool:
    """Whether its rollouts' rewards differ (a bundle of ungrouped ones is compared with the batch, and counts as such)."""
    return group.ungrouped or len({rollout.reward.total for rollout in group.rollouts}) > 1


def useful(groups: Iterable[Group], *, refill: int) -> list[Group]:
    """Those that are trained on: with dynamic sampling (refill > 0) the ones with variance, else all."""
    return [group for group in groups if not refill or has_variance(group)]


async def gather(
    lease: Callable[[int], Awaitable[Lease | None]], num_groups: int, *, refill: int, dropped: Callable[[int], None]
) -> Gathered | None:
    """A step's groups: `num_groups` of them, or fewer once `refill` more were asked for. None when the run is to end first.

    lease(n) waits for a batch of n groups (a redelivered one may have another size); `dropped(n)` makes room for n more.
    """
    leases: list[Lease] = []
    kept: list[Group] = []
    flat = 0
    wanted, left = num_groups, refill
    while wanted > 0:
        found = await lease(wanted)
        if found is None:
            return None
        leases.append(found)
        teaching = useful(found.groups, refill=refill)
        kept += teaching
        flat += len(found.groups) - len(teaching)
        wanted = min(num_groups - len(kept), left) if refill else 0
        left -= max(0, wanted)
        if wanted > 0:
            dropped(wanted)
    return Gathered(leases=tuple(leases), groups=tuple(kept), num_flat=flat)
