"""Which circuits of each switch are ours, as the journal knows it: what a driver has to be told after a restart.

A driver keeps that by itself as long as its process lives. What we made, and what an operator took over, is given back
to it whenever the switch still shows it and the driver takes it for somebody else's.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from ocs_drivers.base import OcsDriver
from ocs_drivers.errors import CircuitConflict
from ocs_drivers.model import CircuitDiff, CrossConnect, CrossConnectReading
from ocs_drivers.ownership import Ownership
from orchestrrl.core.clock import Clock
from orchestrrl.core.journal.store import EntryKind, Journal

logger = logging.getLogger(__name__)


class CircuitOwners:
    """`owns_all`: switches that only we use, so that every circuit on them is ours."""

    def __init__(
        self, switches: Mapping[str, OcsDriver], journal: Journal, clock: Clock, owns_all: Collection[str] = ()
    ) -> None:
        self._switches = switches
        self._journal = journal
        self._clock = clock
        self._owns_all = owns_all
        self._ours: dict[str, Ownership] = {}
        self._written: dict[str, frozenset[CrossConnect]] = {}
        self._scanned: set[str] = set()

    def recover(self, begun: Iterable[tuple[str, CircuitDiff]]) -> None:
        """What earlier daemons owned. `begun`: changes without a result; nobody knows what of them is up by now."""
        for switch, entry in self._journal.latest_by_subject(EntryKind.CIRCUITS_OWNED).items():
            pairs = self._journal.interpret(entry, lambda body: frozenset(map(CrossConnect.parse, body["pairs"])))
            if pairs is None:
                continue
            self._of(switch).take(pairs)
            self._written[switch] = pairs
        for switch, diff in begun:
            self._of(switch).take(diff.add)

    def begun(self, switch: str, diff: CircuitDiff) -> None:
        """Not written: the journal has its intent."""
        self._of(switch).take(diff.add)

    def ended(self, switch: str, gone: Iterable[CrossConnect], taken_over: Sequence[CrossConnect] = ()) -> None:
        """Write down what is ours now. Raises what the journal raises."""
        ours = self._of(switch)
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
            await self.claim(switch, await self._switches[switch].cross_connects())

    async def claim(self, switch: str, reading: CrossConnectReading) -> CrossConnectReading:
        """The reading, with what is ours given back to the driver that takes it for somebody else's."""
        driver = self._switches[switch]
        if reading.foreign:
            if switch in self._owns_all:
                ours = reading.foreign
            else:
                marked = self._of(switch).marked(await driver.facts(), reading.circuits)
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
        return self._of(switch).pairs

    def _of(self, switch: str) -> Ownership:
        return self._ours.setdefault(switch, Ownership())
