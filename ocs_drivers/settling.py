"""Determine from elapsed time which circuits are tuned, for devices that list a cross-connect as soon as it is
commanded.

Until the vendor's stated reconfiguration time has passed since the command, the mirrors are considered to be moving.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ocs_drivers.base import DeviceClock
from ocs_drivers.model import Action, CircuitState, CrossConnect, DeviceCircuit


class Settling:
    """Records when a command to connect each pair of ports was sent. The order of the two ports is ignored, because a
    device may list a pair with its ports exchanged."""

    def __init__(self, clock: DeviceClock, reconfiguration_s: float) -> None:
        self._clock = clock
        self._reconfiguration_s = reconfiguration_s
        self._due_s: dict[frozenset[int], float] = {}

    @contextmanager
    def commanding(self, action: Action, pairs: Iterable[CrossConnect]) -> Iterator[None]:
        """Run the block, which sends a setter for the pairs. If `action` is to add them, record the time at which the
        block ends as the time of the command, even if the block raises an error."""
        try:
            yield
        finally:
            if action is Action.ADD:
                due_s = self._clock.now_s() + self._reconfiguration_s
                self._due_s.update({pair.ports: due_s for pair in pairs})

    def moving(self) -> frozenset[frozenset[int]]:
        """Return the pairs whose mirrors are still moving. This method must be called before the device is read, so
        that a pair that is absent from the result is in place throughout the reading."""
        now_s = self._clock.now_s()
        self._due_s = {key: due_s for key, due_s in self._due_s.items() if due_s > now_s}
        return frozenset(self._due_s)

    def circuits(self, listed: Iterable[CrossConnect], moving: frozenset[frozenset[int]]) -> list[DeviceCircuit]:
        """Return the listed pairs as circuits. `moving` is what the method `moving` returned before the reading. The
        pairs that it contains are in state tuning, and all others in state tuned."""
        return [
            DeviceCircuit(pair, CircuitState.TUNING if pair.ports in moving else CircuitState.TUNED) for pair in listed
        ]
