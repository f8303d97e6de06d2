"""Which groups have enough finished answers, over all gateways. Values only.

Each gateway cancels what is redundant among its own requests; only the daemon sees a group whose samples are spread
over several.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from orchestrrl.fleet.reports import FinishedRequest

# Endings that make an answer one that a trainer can use.
USABLE = frozenset({"stop", "length"})
# Far more than a step has; those that were heard of last are kept.
GROUPS_REMEMBERED = 65536


class FinishedGroups:
    """Counts finished answers. A group's id may be used again in a later step, never within one."""

    def __init__(self) -> None:
        self._finished: dict[str, int] = {}
        self._enough: dict[str, None] = {}

    def count(self, finished: Iterable[FinishedRequest]) -> None:
        """Each answer once, by the caller's care."""
        for answer in finished:
            if not answer.group or not answer.group_enough or answer.finish_reason not in USABLE:
                continue
            count = self._finished.pop(answer.group, 0) + 1
            self._finished[answer.group] = count
            if count >= answer.group_enough:
                self._enough[answer.group] = None
        keep_newest(self._finished, GROUPS_REMEMBERED)

    def take(self) -> frozenset[str]:
        """Groups of which an answer came since the last call, and that have enough."""
        taken, self._enough = frozenset(self._enough), {}
        return taken

    def forget(self) -> None:
        """A new step begins."""
        self._finished.clear()
        self._enough.clear()


def keep_newest(entries: dict[Any, Any], most: int) -> None:
    """Delete the oldest entries beyond so many, together: the first key of a dictionary is searched for behind all that
    were deleted before it."""
    for key in list(islice(entries, max(0, len(entries) - most))):
        del entries[key]
