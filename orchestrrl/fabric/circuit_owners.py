"""Store which circuits of each switch the daemon owns, so that drivers can be informed after a restart.

A driver stores this only while its process lives. A circuit that the daemon made, or that an operator took over, is
assigned to the driver again whenever the switch still shows it and the driver treats it as foreign."""

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
    """Circuits that the daemon owns, by switch. `owns_all` lists switches used by this daemon alone: it owns every
    circuit on them. Construction recovers the records of earlier daemons from the journal."""

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
        """Take ownership of the circuits of a change before it is sent. Not journalled, as the journal has its
        intent."""
        self._ours[switch].take(diff.add)

    def ended(self, switch: str, gone: Iterable[CrossConnect], taken_over: Sequence[CrossConnect] = ()) -> None:
        """Journal what the daemon owns now. Raises the journal's errors."""
        ours = self._ours[switch]
        ours.release(gone)
        ours.take(taken_over)
        if ours.pairs == self._written.get(switch, frozenset()):
            return
        body = {"pairs": [str(pair) for pair in sorted(ours.pairs)], "taken_over": [str(pair) for pair in taken_over]}
        self._journal.append(self._clock.now_s(), EntryKind.CIRCUITS_OWNED, switch, body)
        self._written[switch] = ours.pairs

    async def before_planning(self, switch: str) -> None:
        """Ensure that the driver has the owned circuits of the switch. Raises DriverError if the switch cannot be
        read."""
        if switch not in self._scanned or switch in self._owns_all:
            await self.read(switch)

    async def read(self, switch: str) -> CrossConnectReading:
        """Return what the switch shows, after assigning owned circuits that its driver treats as foreign. Raises
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
                except CircuitConflict:  # some went down meanwhile: the next reading decides
                    return await driver.cross_connects()
                logger.info("switch %s: took over %d circuits that this daemon owns", switch, len(ours))
        self._scanned.add(switch)
        return reading

    def owned(self, switch: str) -> frozenset[CrossConnect]:
        """Return the circuits on the switch that the daemon made or took over, and has not taken down."""
        return self._ours[switch].pairs
