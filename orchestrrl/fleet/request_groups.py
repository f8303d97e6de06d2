"""Count the finished answers of each request group over all gateways, without I/O.

If one gateway serves all samples of a group, it cancels the group's redundant requests itself. If the samples are
spread over several gateways, only the daemon can detect that the group has enough answers.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from orchestrrl.fleet.reports import FinishedRequest

# The finish reasons of answers that a trainer can use.
USABLE = frozenset({"stop", "length"})
# Far more than a step has; the latest are kept.
GROUPS_REMEMBERED = 65536


class FinishedGroups:
    """Counts finished answers per group. A group id may be reused in a later step, but not within the same step."""

    def __init__(self) -> None:
        self._finished: dict[str, int] = {}
        self._enough: dict[str, None] = {}

    def count(self, finished: Iterable[FinishedRequest]) -> None:
        """Add the usable answers in `finished` to the counts of their groups. The caller must pass each answer only
        once."""
        for answer in finished:
            if not answer.group or not answer.group_enough or answer.finish_reason not in USABLE:
                continue
            count = self._finished.pop(answer.group, 0) + 1
            self._finished[answer.group] = count
            if count >= answer.group_enough:
                self._enough[answer.group] = None
        keep_newest(self._finished, GROUPS_REMEMBERED)

    def take(self) -> frozenset[str]:
        """Return the groups that have enough answers and have received at least one answer since the last call."""
        taken, self._enough = frozenset(self._enough), {}
        return taken

    def forget(self) -> None:
        """Clear all counts at the start of a new step."""
        self._finished.clear()
        self._enough.clear()


def keep_newest(entries: dict[Any, Any], most: int) -> None:
    """Delete the oldest entries, so that at most `most` entries remain. They are deleted in one batch, because a search
    for the oldest key of a dictionary is slow after many deletions: it passes over the place of every deleted key."""
    for key in list(islice(entries, max(0, len(entries) - most))):
        del entries[key]
