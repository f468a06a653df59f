"""The control groups of one backend's sandboxes: one that is empty again serves another sandbox, which costs far less than a new one.

Invariant: a group is one sandbox's at a time, and no process of the one before is in it.
"""

from collections import deque
from itertools import count
from typing import Final

from rlagent.sandboxes.base import Limits
from rlagent.sandboxes.cgroups import Cgroups, Group

_NUM_SPARE: Final = 64


class Groups:
    """The groups of one owner's sandboxes. For threads."""

    def __init__(self, cgroups: Cgroups, owner: str, limits: Limits) -> None:
        self._cgroups, self._owner, self._limits = cgroups, owner, limits
        self._numbers = count()
        self._spare: deque[Group] = deque()

    def take(self) -> Group | None:
        """A group that is a sandbox's alone. None where there are no control groups. OSError where a limit cannot be set."""
        if not self._cgroups.own:
            return None
        try:
            return self._spare.pop()
        except IndexError:
            return self._cgroups.make(self._owner, f"g{next(self._numbers)}", self._limits)

    def give_back(self, group: Group) -> None:
        """Keep it for the next sandbox, or remove it."""
        if len(self._spare) < _NUM_SPARE and group.is_clean():
            self._spare.append(group)
        else:
            group.close()
