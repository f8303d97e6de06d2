"""Which circuits of each switch are ours, as the journal knows it: what a driver has to be told after a restart.

A driver keeps that by itself as long as its process lives. What we made, and what an operator took over, is given back
to it whenever the switch still shows it and the driver takes it for somebody else's.
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
    """`owns_all`: switches that only we use, so that every circuit on them is ours. Construction recovers what the
    journal holds of earlier daemons."""

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
        """A change is sent, or may have been. Not written: the journal has its intent."""
        self._ours[switch].take(diff.add)

    def ended(self, switch: str, gone: Iterable[CrossConnect], taken_over: Sequence[CrossConnect] = ()) -> None:
        """Write down what is ours now. Raises what the journal raises."""
        ours = self._ours[switch]
        ours.release(gone)
        ours.take(taken_over)
        if ours.pairs == self._written.get(switch, frozenset()):
            return
        body = {"pairs": [str(pair) for pair in sorted(ours.pairs)], "taken_over": [str(pair) for pair in taken_over]}
        self._journal.append(self._clock.now_s(), EntryKind.CIRCUITS_OWNED, switch, body)
        self._written[switch] = ours.pairs

    async def before_planning(self, switch: str) -> None:
        """The driver knows what is ours. Raises DriverError where the switch cannot be read."""
        if switch not in self._scanned or switch in self._owns_all:
            await self.read(switch)

    async def read(self, switch: str) -> CrossConnectReading:
        """What the switch shows, with what is ours given back to the driver that takes it for somebody else's. Raises
        DriverError."""
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
                except CircuitConflict:  # some went meanwhile: the next look will tell
                    return await driver.cross_connects()
                logger.info("%s: %d circuits are ours", switch, len(ours))
        self._scanned.add(switch)
        return reading

    def owned(self, switch: str) -> frozenset[CrossConnect]:
        """What we have made there, or taken over, and not taken down."""
        return self._ours[switch].pairs
