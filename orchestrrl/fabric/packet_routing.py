"""Route packets over circuits: translate the coordinator's requests about cross-connects into changes of links between
routers.

The coordinator changes cross-connects, whereas packets use links between ToRs. A link inside a PoD uses one
cross-connect, and a link between PoDs uses three (planner/fabric/light.py). Between commits, `maintain` reroutes
packets when links lose or regain light, and retries routers that have failed. rerouting.py changes the routers.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.offload import Offload
from orchestrrl.fabric.rerouting import Rerouting, RoutedCircuits
from orchestrrl.fabric.switch_reader import SiteReading
from planner.fabric.light import Interface, Lit, links_up
from planner.fabric.model import OcsId, Port, PortPair
from planner.fabric.route_plan import RoutedLink
from planner.fabric.topology import Site
from planner.fabric.transition import TransitionStage

logger = logging.getLogger(__name__)

Look = Callable[[], Awaitable[SiteReading]]

WRITE_EVERY_S = 60.0
LONGEST_PAUSE_S = 60.0  # between two attempts that find the same links


class FabricRouting:
    """Routes packets over the circuits of one site. The caller runs `maintain` as a task. Changes of routes are
    serialised."""

    def __init__(
        self,
        site: Site,
        interfaces: Mapping[Port, Interface],
        rerouting: Rerouting,
        scan: Look,
        journal: Journal,
        clock: Clock,
        *,
        poll_s: float = 5.0,
        offload: Offload,
    ) -> None:
        self.defects = 0  # internal errors caught in `maintain`
        self._site = site
        self.interfaces = interfaces  # the router interface behind each port that a ToR is fibred to
        self.rerouting = rerouting
        self._scan = scan
        self._journal = journal
        self._clock = clock
        self._poll_s = poll_s
        self._offload = offload
        self._turn = asyncio.Lock()
        self._lit: tuple[Lit, ...] = ()
        self._is_changing = False  # drained, but not yet rerouted
        # the links that `maintain` tried last, and its next pause
        self._tried: tuple[frozenset[RoutedLink], float] = (frozenset(), 0.0)
        self._again_s = 0.0
        self._recorded_s = -math.inf
        self._recorded = journal.newest(EntryKind.REROUTED, _recorded_in) or frozenset()

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """Suspend rerouting inside the `async with` block, so that cables can be checked. Routes do not change inside
        the block, even if links gain or lose light."""
        async with self._turn:
            was, self._is_changing = self._is_changing, True
            try:
                yield
            finally:
                self._is_changing = was
                self._lit = (*self._lit,)  # a new object, so that a poll that ran meanwhile discards its result

    # --- called by the coordinator

    async def prepare(self, up: Iterable[PortPair], stages: Sequence[TransitionStage]) -> None:
        """Compute and cache the routes before and after each stage of a transition, before its window opens. `up`
        contains the cross-connects that are up now."""
        points, now = [], frozenset(up)
        for stage in stages:
            drained = now.difference(stage.remove)
            now = drained.union(stage.add)
            points += [drained, now]

        def find() -> None:
            for point in points:
                self.rerouting.prepare(frozenset(lit.link for lit in links_up(self._site, point, self.interfaces)))

        async with self._turn:
            await self._offload(find)

    async def drain(self, going: Iterable[PortPair]) -> None:
        """Move packets off the links that use these cross-connects. Raises OrchestrRLError if a router may still use
        such a link. In this case, the next `reroute` or `maintain` restores the routes that were moved."""
        going = frozenset(going)
        await self._begin()
        async with self._turn:
            leaving = [lit.link for lit in self._lit if lit.goes_over(going)]
            if leaving:
                await self.rerouting.drain(leaving)
            self._is_changing = True
            self._lit = tuple(lit for lit in self._lit if not lit.goes_over(going))

    async def reroute(self, usable: Iterable[PortPair]) -> str:
        """Route packets over all links that these cross-connects form, and return the remaining faults as text. If a
        switch does not answer, its cross-connects that were not drained are considered up even if they are missing from
        `usable`. The links over them are used if they have light."""
        async with self._turn:
            wanted = frozenset(usable)
            gone = self._over - wanted
            self._lit = await self._find(wanted | _on(gone, (await self._scan()).unread if gone else ()))
            self._tried = (frozenset(), 0.0)
            routed = await self.rerouting.reroute(lit.link for lit in self._lit)
            self._is_changing = False
            return routed.faults_text

    async def close(self) -> None:
        if self.routed is not None:
            self._write_down()
        await self.rerouting.close()

    # --- between commits

    async def maintain(self) -> None:
        """Route packets over the circuits that are up, then correct the routes periodically, until cancelled."""
        while True:
            try:
                await self._begin()
                await self._poll_again()
                if self._clock.now_s() >= self._recorded_s + WRITE_EVERY_S:
                    self._write_down()
            except OrchestrRLError as error:
                logger.warning("routes could not be checked: %s", error)
            except Exception:
                # An internal error, or one router driver's, must not stop the daemon.
                self.defects += 1
                logger.exception("routes could not be checked")
            await self._clock.sleep(self._poll_s)

    async def _begin(self) -> None:
        """Route packets over the circuits that are up, unless they are routed already."""
        async with self._turn:
            if self.routed is None:
                self._lit = await self._find(await self._seen())
                await self.rerouting.reroute(lit.link for lit in self._lit)

    async def _poll_again(self) -> None:
        if self._is_changing or self.routed is None:
            return
        before = self._lit
        lit = await self._find(await self._seen())
        dark = await self.rerouting.dark([each.link for each in lit])
        usable = frozenset(each.link for each in lit if each.link not in dark)
        tried, pause_s = self._tried
        if tried == usable and self._clock.now_s() < self._again_s:
            return
        async with self._turn:
            if self._is_changing or self._lit is not before:  # a commit came first
                return
            self._lit = lit
            if usable == set(self.routed.links) and not self.routed.failed:
                self.rerouting.leave_out(dark)
                return
            routed = await self.rerouting.reroute(usable)
            routed = self.rerouting.leave_out({**dark, **routed.left_out})
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if tried == usable else self._poll_s
            self._tried, self._again_s = (usable, pause_s), self._clock.now_s() + pause_s
        logger.warning("packets use %d of %d links: %s", len(routed.links), len(lit), routed.faults_text or "no faults")

    async def _seen(self) -> frozenset[PortPair]:
        """Return the cross-connects that are up. For a switch that does not answer, return the cross-connects that were
        last known to be up."""
        known = self._over or self._recorded
        site_reading = await self._scan()
        return site_reading.cross_connects | _on(known, site_reading.unread)

    @property
    def routed(self) -> RoutedCircuits | None:
        """The current routing, or None until the circuits are known."""
        return self.rerouting.routed

    @property
    def _over(self) -> frozenset[PortPair]:
        return frozenset(pair for lit in self._lit for pair in lit.over)

    async def _find(self, up: frozenset[PortPair]) -> tuple[Lit, ...]:
        found: tuple[Lit, ...] = await self._offload(lambda: links_up(self._site, up, self.interfaces))
        return found

    def _write_down(self) -> None:
        """Journal the cross-connects that packets use. A restarted daemon uses this record for switches that do not
        answer. An outdated record does no harm, because routers check their neighbours before they use a link."""
        if self._recorded != self._over and not self._is_changing:
            self._recorded, self._recorded_s = self._over, self._clock.now_s()
            body = {"cross_connects": [(each.switch, *each.ports) for each in sorted(self._recorded)]}
            self._journal.append(self._recorded_s, EntryKind.REROUTED, "", body)


def _recorded_in(body: Mapping[str, Any]) -> frozenset[PortPair]:
    return frozenset(PortPair(*each) for each in body["cross_connects"])


def _on(pairs: Iterable[PortPair], switches: Collection[OcsId]) -> frozenset[PortPair]:
    return frozenset(pair for pair in pairs if pair.switch in switches)
