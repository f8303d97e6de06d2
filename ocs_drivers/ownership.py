"""Record which cross-connects of a device a driver owns. A driver owns the cross-connects that it made, and those that
the caller explicitly asked it to take over."""

from collections.abc import Iterable
from dataclasses import replace

from ocs_drivers.diff import occupants
from ocs_drivers.model import CrossConnect, DeviceCircuit, SwitchFacts


class Ownership:
    """The set of owned cross-connects. A circuit is owned from the moment at which the command to connect it is sent. A
    circuit that appears late, after a command with an unknown outcome, is therefore not mistaken for another client's.
    A circuit stays owned even while the device does not show it, for example during a restart, until this driver
    removes it or another circuit uses one of its ports."""

    def __init__(self) -> None:
        self._ours: set[CrossConnect] = set()

    def take(self, pairs: Iterable[CrossConnect]) -> None:
        self._ours.update(pairs)

    def release(self, pairs: Iterable[CrossConnect]) -> None:
        """Drop the ownership of these circuits, because they were removed or were never established."""
        self._ours.difference_update(pairs)

    def marked(self, facts: SwitchFacts, circuits: Iterable[DeviceCircuit]) -> tuple[DeviceCircuit, ...]:
        """Return the circuits that the device shows, sorted, with `ours` set on the owned circuits. Drop the ownership
        of pairs whose ports now carry another circuit."""
        shown = sorted(circuits, key=lambda circuit: circuit.cross_connect)
        holders = occupants(facts, (circuit.cross_connect for circuit in shown))
        self._ours = {pair for pair in self._ours if all(holders.get(end, pair) == pair for end in facts.ends(pair))}
        return tuple(replace(circuit, ours=circuit.cross_connect in self._ours) for circuit in shown)

    @property
    def pairs(self) -> frozenset[CrossConnect]:
        return frozenset(self._ours)
