"""Circuits of a device that lists a cross-connect as soon as it is commanded, and says no more: tuned by the clock.

Until the vendor's stated time has passed since the command, mirrors are taken to be moving still.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ocs_drivers.base import DeviceClock
from ocs_drivers.model import Action, CircuitState, CrossConnect, DeviceCircuit


class Settling:
    """What was commanded, and when. Directions are not told apart: a device may list a pair the other way round."""

    def __init__(self, clock: DeviceClock, reconfiguration_s: float) -> None:
        self._clock = clock
        self._reconfiguration_s = reconfiguration_s
        self._due_s: dict[frozenset[int], float] = {}

    @contextmanager
    def commanding(self, action: Action, pairs: Iterable[CrossConnect]) -> Iterator[None]:
        """Note what is added once the block, which sends the setter, is over, however it ends."""
        try:
            yield
        finally:
            if action is Action.ADD:
                due_s = self._clock.now_s() + self._reconfiguration_s
                self._due_s.update({pair.ports: due_s for pair in pairs})

    def moving(self) -> frozenset[frozenset[int]]:
        """Ask before the device is read: what it lists was so no earlier than this."""
        now_s = self._clock.now_s()
        self._due_s = {key: due_s for key, due_s in self._due_s.items() if due_s > now_s}
        return frozenset(self._due_s)

    def circuits(self, listed: Iterable[CrossConnect], moving: frozenset[frozenset[int]]) -> list[DeviceCircuit]:
        """The circuits of a reading before which `moving` was asked."""
        return [
            DeviceCircuit(pair, CircuitState.TUNING if pair.ports in moving else CircuitState.TUNED) for pair in listed
        ]
