"""Which cross-connects of a device are ours: made by this driver, or taken over by name. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from ocs_drivers.diff import occupants
from ocs_drivers.model import CrossConnect, DeviceCircuit, SwitchFacts


class Ownership:
    """A circuit is ours from the moment it is commanded: one that comes late, after an unknown outcome, is no
    stranger. It stays ours when it is not shown for a while, e.g. while the device restarts and restores, until it
    was taken down by us or its ports carry something else."""

    def __init__(self) -> None:
        self._ours: set[CrossConnect] = set()

    def take(self, pairs: Iterable[CrossConnect]) -> None:
        self._ours.update(pairs)

    def release(self, pairs: Iterable[CrossConnect]) -> None:
        """Taken down, or never came about."""
        self._ours.difference_update(pairs)

    def marked(self, facts: SwitchFacts, circuits: Iterable[DeviceCircuit]) -> tuple[DeviceCircuit, ...]:
        """The circuits of a reading, sorted and each with whose it is."""
        shown = sorted(circuits, key=lambda circuit: circuit.cross_connect)
        holders = occupants(facts, (circuit.cross_connect for circuit in shown))
        self._ours = {pair for pair in self._ours if all(holders.get(end, pair) == pair for end in facts.ends(pair))}
        return tuple(replace(circuit, ours=circuit.cross_connect in self._ours) for circuit in shown)

    @property
    def pairs(self) -> frozenset[CrossConnect]:
        return frozenset(self._ours)
