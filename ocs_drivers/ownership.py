"""Record which cross-connects of a device this driver owns: those it made or took over by name. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from ocs_drivers.diff import occupants
from ocs_drivers.model import CrossConnect, DeviceCircuit, SwitchFacts


class Ownership:
    """The set of owned cross-connects. A circuit is owned from the moment it is commanded, so one that appears late,
    after an unknown outcome, is not foreign. It stays owned while it is not shown, e.g. while the device restarts and
    restores, until this driver removes it or its ports carry another circuit."""

    def __init__(self) -> None:
        self._ours: set[CrossConnect] = set()

    def take(self, pairs: Iterable[CrossConnect]) -> None:
        self._ours.update(pairs)

    def release(self, pairs: Iterable[CrossConnect]) -> None:
        """Drop ownership of circuits that were removed or never came up."""
        self._ours.difference_update(pairs)

    def marked(self, facts: SwitchFacts, circuits: Iterable[DeviceCircuit]) -> tuple[DeviceCircuit, ...]:
        """Return the circuits of a reading, sorted, each with its ownership. Owned pairs whose ports now carry another
        circuit are dropped."""
        shown = sorted(circuits, key=lambda circuit: circuit.cross_connect)
        holders = occupants(facts, (circuit.cross_connect for circuit in shown))
        self._ours = {pair for pair in self._ours if all(holders.get(end, pair) == pair for end in facts.ends(pair))}
        return tuple(replace(circuit, ours=circuit.cross_connect in self._ours) for circuit in shown)

    @property
    def pairs(self) -> frozenset[CrossConnect]:
        return frozenset(self._ours)
