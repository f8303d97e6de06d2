"""Record which circuits of each switch the daemon owns, so that drivers can be informed after a restart of the daemon.

A driver stores ownership only in memory. If a switch still has a circuit that the daemon made or an operator took over,
and the driver treats the circuit as foreign, the driver is instructed to take the circuit over again.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from ocs_drivers.base import OcsDriver
from ocs_drivers.errors import CircuitConflict
from ocs_drivers.model import CircuitDiff, CrossConnect, CrossConnectReading
from ocs_drivers.ownership import Ownership
from orchestrrl.core.clock import Clock
from orchestrrl.core.journal.store import EntryKind, Journal

logger = logging.getLogger(__name__)


class CircuitOwners:
    """The circuits that the daemon owns, by switch. `owns_all` lists the switches on which the daemon owns every
    circuit, because they have no other users. Construction recovers the records of earlier daemons from the journal."""

    def __init__(
        self, switches: Mapping[str, OcsDriver], journal: Journal, clock: Clock, owns_all: Collection[str] = ()
    ) -> None:
        self._switches = switches
        self._journal = journal
        self._clock = clock
        self._owns_all = owns_all
        self._ours: defaultdict[str, Ownership] = defaultdict(Ownership)
        self._written: dict[str, frozenset[CrossConnect]] = {}
        self._scanned: set[str] = set()
        for switch, entry in journal.latest_by_subject(EntryKind.CIRCUITS_OWNED).items():
            pairs = journal.interpret(entry, lambda body: frozenset(map(CrossConnect.parse, body["pairs"])))
            if pairs is not None:
                self._ours[switch].take(pairs)
                self._written[switch] = pairs

    def begun(self, switch: str, diff: CircuitDiff) -> None:
        """Take ownership of the circuits that a change adds, before the change is sent. The ownership is not
        journalled, because the journal already contains the change's intent."""
        self._ours[switch].take(diff.add)

    def ended(self, switch: str, gone: Iterable[CrossConnect], taken_over: Sequence[CrossConnect] = ()) -> None:
        """Release the circuits `gone`, take ownership of `taken_over`, and journal the owned circuits if they have
        changed. Raises Permanent if the journal cannot be written."""
        ours = self._ours[switch]
        ours.release(gone)
        ours.take(taken_over)
        if ours.pairs == self._written.get(switch, frozenset()):
            return
        body = {"pairs": [str(pair) for pair in sorted(ours.pairs)], "taken_over": [str(pair) for pair in taken_over]}
        self._journal.append(self._clock.now_s(), EntryKind.CIRCUITS_OWNED, switch, body)
        self._written[switch] = ours.pairs

    async def before_planning(self, switch: str) -> None:
        """Ensure that the switch's driver treats the circuits that the daemon owns as owned. Raises DriverError if the
        switch cannot be read."""
        if switch not in self._scanned or switch in self._owns_all:
            await self.read(switch)

    async def read(self, switch: str) -> CrossConnectReading:
        """Instruct the switch's driver to take over circuits that the daemon owns but the driver treats as foreign, and
        return the reading of the switch afterwards. Raises DriverError if the switch cannot be read."""
        driver = self._switches[switch]
        reading = await driver.cross_connects()
        if reading.foreign:
            if switch in self._owns_all:
                ours = reading.foreign
            else:
                marked = self._ours[switch].marked(await driver.facts(), reading.circuits)
                ours = reading.foreign.intersection(circuit.cross_connect for circuit in marked if circuit.ours)
            if ours:
                try:
                    reading = await driver.take_over(sorted(ours))
                except CircuitConflict:  # some went down meanwhile: the next reading decides
                    return await driver.cross_connects()
                logger.info("switch %s: took over %d circuits that this daemon owns", switch, len(ours))
        self._scanned.add(switch)
        return reading

    def owned(self, switch: str) -> frozenset[CrossConnect]:
        """Return the circuits on the switch that the daemon made or took over and has not removed."""
        return self._ours[switch].pairs
