"""Under which policy version each token of an answer was generated, and which answers have become too old. Pure.

A version is the trainer's name of the weights, a number. It usually grows; a trainer that goes back to a checkpoint
takes it back. An answer's lag is how far the fleet's version is ahead of the one that its oldest token came from, the
gap that bounds off-policy data in asynchronous training (ROLL Flash's asynchronous ratio).
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end`, without the latter, and the policy that they are from; None: nobody told its version."""

    version: int | None
    start: int
    end: int


class OnStale(StrEnum):
    """What becomes of an answer that is older than its bound."""

    ABORT = "abort"  # it ends with what it has
    RESTART = "restart"  # it begins anew, unless its client has had some of it


class PolicyVersions:
    """The spans of one answer as they come: for every change, where it was."""

    __slots__ = ("_starts", "newest", "oldest")

    def __init__(self) -> None:
        self._starts: list[tuple[int, int | None]] = []
        self.newest: int | None = None
        self.oldest: int | None = None  # the least that is known

    def add(self, version: int | None, start: int) -> None:
        """From token `start` on. Calls come in order."""
        if self._starts and version == self.newest:
            return
        self._starts.append((start, version))
        self.newest = version
        if version is not None and (self.oldest is None or version < self.oldest):
            self.oldest = version

    def changes(self, start: int) -> list[tuple[int, int | None]]:
        """The version of token `start`, and the changes after it, each with the first token that it holds for."""
        if not self._starts or self._starts[-1][0] <= start:
            return [(start, self.newest)]
        return [(span.start, span.version) for span in self.spans(self._starts[-1][0] + 1) if span.end > start]

    def spans(self, tokens: int) -> tuple[VersionSpan, ...]:
        """Of an answer of so many tokens."""
        ends = [*(start for start, _ in self._starts[1:]), tokens][: len(self._starts)]
        return tuple(
            VersionSpan(version, start, end)
            for (start, version), end in zip(self._starts, ends, strict=True)
            if end > start
        )


def lag(oldest: int | None, newest: int | None) -> int:
    """How many versions an answer is behind; 0 where either is not known, or the trainer went back."""
    return 0 if oldest is None or newest is None else max(0, newest - oldest)
