"""What a driver may offer beyond the contract: a commit made ready ahead, and begun at a word.

Between a word and a command at a device nothing is to be built, connected or read that could have been before. Where a
driver has nothing to gain from it, its `commit` is called at the word instead.
"""

from typing import Protocol, runtime_checkable

from ocs_drivers.model import CircuitDiff, CommitResult


class Armed(Protocol):
    """One commit that waits for its word. It is begun at most once."""

    async def begin(self) -> CommitResult:
        """As `OcsDriver.commit` from here on: the device is asked whether it still is at the expected revision."""
        ...

    def disarm(self) -> None:
        """It is not wanted any more; harmless where it is over. What has begun is carried on with."""
        ...


@runtime_checkable
class Arming(Protocol):
    async def arm(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> Armed:
        """All of `OcsDriver.commit` that does not touch the device. Raises DriverError as that does."""
        ...
