"""Move packets off circuits before the caller changes the switches (drain). Afterwards, wait until the new circuits
have light, and route packets over them.

    await rerouting.drain(going)     # if this raises NotDrained, the circuits must stay
    ...                              # the switches are changed
    await rerouting.reroute(usable)  # all circuits that are up or coming up

Routes are read from the routers each time. After a restart or an unknown outcome, the next call therefore starts from
the actual routes. `planner/fabric/route_plan.py` divides a change of routes into stages, and the routers are read back
after each stage. If a router fails, the routers whose new routes depend on it keep their old routes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import ReroutingSettings
from orchestrrl.core.errors import OrchestrRLError, Permanent, Retryable, few
from orchestrrl.core.offload import Offload, inline
from orchestrrl.fabric.route_drivers.base import AppliedRoutes
from orchestrrl.fabric.route_drivers.driver import RouterDriver
from planner.fabric import route_plan as pure
from planner.fabric.model import EndpointId
from planner.fabric.route_plan import NextHop, RouteChange, RoutedLink, RouteTable, RoutingDomain

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 1.0
LISTED = 4
KEPT = 64  # sets of circuits whose routes are cached


class NotDrained(Retryable):
    """Raised if routers still send, or may still send, packets over circuits that are to be removed. The circuits must
    then stay up. `Rerouting.reroute` restores the routes that were moved off these circuits."""

    def __init__(self, routers: Mapping[EndpointId, str]) -> None:
        super().__init__(f"not drained: {_listed(routers)}", RETRY_S)
        self.routers = routers


@dataclass(frozen=True, slots=True)
class RoutedCircuits:
    """The current routing of packets over circuits. `left_out` maps each circuit that packets do not use to the reason.
    `on_packet_side` lists the (from, to) pairs of routers whose packets take the packet side at the first hop."""

    at_s: float
    links: tuple[RoutedLink, ...]
    left_out: Mapping[RoutedLink, str]
    failed: Mapping[EndpointId, str]  # routers that did not take their routes
    unreachable: tuple[tuple[EndpointId, EndpointId], ...]  # (from, to)
    on_packet_side: tuple[tuple[EndpointId, EndpointId], ...]

    @property
    def faults_text(self) -> str:
        """The faults of the routing on one line, or "" if every link is used and every router has its routes. Pairs of
        routers that cannot reach each other are not included."""
        reported = (("not used", self.left_out), ("routers with wrong routes", self.failed))
        return "; ".join(f"{what}: {_listed(some)}" for what, some in reported if some)


@dataclass
class _Moved:
    """The progress of a change of routing tables. `failed` maps each failed router to the reason for the failure.
    `unread` contains the routers whose current table is unknown."""

    plan: pure.ReroutingPlan
    failed: dict[EndpointId, str] = field(default_factory=dict)
    unread: set[EndpointId] = field(default_factory=set)


class Rerouting:
    """Changes the routes of the routers of one domain. `drain` and `reroute` must not run concurrently."""

    def __init__(
        self,
        routers: Mapping[EndpointId, RouterDriver],
        domain: RoutingDomain,
        clock: Clock,
        settings: ReroutingSettings,
        offload: Offload = inline,
    ) -> None:
        if set(routers) != set(domain.routers):
            raise ValueError(f"routers must be those of the domain ({sorted(domain.routers)}), got {sorted(routers)}")
        self.domain = domain
        self._routers = routers
        self._clock = clock
        self._settings = settings
        self._offload = offload  # runs work that is slow on a large site
        self.routed: RoutedCircuits | None = None  # the current routing; None before the first `reroute`
        # Computes the routes over these circuits, cached: periods recur, and a window is short. Contacts no router.
        self.prepare = lru_cache(KEPT)(partial(pure.reroute, domain))
        self._tables: dict[EndpointId, RouteTable] = {}  # as last read; for an unreachable router, as last known

    async def drain(self, going: Collection[RoutedLink]) -> RoutedCircuits:
        """Move packets off circuits that are about to go down, and return the new routing. Raises NotDrained if a
        router uses or may use one of these circuits, and Permanent if `reroute` has not been called yet."""
        if self.routed is None:
            raise Permanent("cannot drain circuits before they are known; call `reroute` first")
        left = frozenset(self.routed.links).difference(going)
        moved = await self._move(self.prepare(left))
        still = self._still_using(going, moved)
        if still:
            logger.warning("circuits are not drained: %s", _listed(still))
            self.routed = replace(self.routed, failed=still)
            raise NotDrained(still)
        drained = self._took(left, moved, {})
        await self._clock.sleep(self._settings.settle_s)
        return drained

    async def reroute(self, usable: Iterable[RoutedLink]) -> RoutedCircuits:
        """Route packets over these circuits, and return the new routing. Circuits that get no light within the time
        limit, or whose far end does not answer, are left out. Raises ValueError, before any router is changed, if the
        circuits do not fit the routing domain."""
        usable = frozenset(usable)
        await self._offload(lambda: self.prepare(usable))  # raises ValueError before any router changes
        left_out = dict(sorted((await self._dark_ones(usable)).items()))
        links = usable.difference(left_out) if left_out else usable
        rerouted = self._took(links, await self._move(self.prepare(links)), left_out)
        logger.info("packets rerouted over %d circuits: %s", len(links), rerouted.faults_text or "no faults")
        return rerouted

    def leave_out(self, circuits: Mapping[RoutedLink, str]) -> RoutedCircuits:
        """Record the circuits that currently carry no packets, each with the reason, and return the updated routing. No
        router is changed."""
        assert self.routed is not None
        self.routed = replace(self.routed, left_out=circuits)
        return self.routed

    def _took(self, links: Iterable[RoutedLink], moved: _Moved, left_out: Mapping[RoutedLink, str]) -> RoutedCircuits:
        """Record that packets use these links now, and return the new routing."""
        at_s, ways = self._clock.now_s(), moved.plan
        routed = RoutedCircuits(
            at_s, tuple(sorted(links)), left_out, moved.failed, ways.unreachable, ways.on_packet_side
        )
        self.routed = routed
        return routed

    async def close(self) -> None:
        """Close the drivers of all routers. The routers keep their routes."""
        for router in self._routers.values():
            await router.close()

    async def dark(self, links: Collection[RoutedLink]) -> dict[RoutedLink, str]:
        """Return the links that have no light now, each with the reason. Links whose routers do not report are not
        included."""
        seen = await self._up(links, 0.0)
        return {link: why for link, why in seen.items() if not isinstance(why, OrchestrRLError)}

    async def signals(self) -> tuple[frozenset[tuple[EndpointId, str]], dict[EndpointId, str]]:
        """Return the interfaces that have a signal, as (router, interface) pairs, and the routers that do not report,
        each with the reason."""
        reported = await self._each({name: router.links() for name, router in self._routers.items()})
        up: set[tuple[EndpointId, str]] = set()
        silent: dict[EndpointId, str] = {}
        for name, links in reported.items():
            if isinstance(links, OrchestrRLError):
                silent[name] = str(links)
            else:
                up |= {(name, interface) for interface, is_up in links.items() if is_up}
        return frozenset(up), silent

    async def answering_routers(
        self, requested: Mapping[tuple[EndpointId, str], Collection[EndpointId]]
    ) -> dict[tuple[EndpointId, str], frozenset[EndpointId]]:
        """Return, for each (router, interface) pair in `requested`, which of the listed routers answer on this
        interface. Interfaces on which none of them answers are absent."""
        hops: dict[EndpointId, dict[NextHop, tuple[str, EndpointId]]] = {}
        for (name, interface), others in requested.items():
            for other in others:
                if other != name:
                    hop = NextHop(self.domain.routers[other].address, interface)
                    hops.setdefault(name, {})[hop] = (interface, other)
        found = await self._find(hops)
        answering: dict[tuple[EndpointId, str], set[EndpointId]] = {}
        for name, answered in found.items():
            for hop in () if isinstance(answered, OrchestrRLError) else answered:
                interface, other = hops[name][hop]
                answering.setdefault((name, interface), set()).add(other)
        return {end: frozenset(some) for end, some in answering.items()}

    async def _dark_ones(self, links: Collection[RoutedLink]) -> dict[RoutedLink, str]:
        """Wait until new circuits have light, but no longer than the configured time limit. Return the circuits that
        cannot carry packets, each with the reason."""
        old = set(links).intersection(self.routed.links if self.routed else ())
        new = set(links) - old
        dark = await self.dark(old)  # circuits that carry packets stay in use if their routers do not report
        came = await self._up(new, self._settings.link_up_s)
        dark |= {link: str(why) for link, why in came.items()}  # a driver's errors begin with its name
        return dark | await self._silent_ones([link for link in sorted(new) if link not in dark])

    async def _up(self, links: Collection[RoutedLink], limit_s: float) -> dict[RoutedLink, str | OrchestrRLError]:
        """Wait at most `limit_s` seconds for the links to come up. Return the links that are not known to be up, each
        with the reason or, if a router did not report, with the router's error."""
        waiting = {name: self._routers[name].wait_up(some, limit_s) for name, some in _interfaces(links).items()}
        up = await self._each(waiting)
        found: dict[RoutedLink, str | OrchestrRLError] = {}
        for link, (name, interface) in ((one, end) for one in sorted(links) for end in one.ends):
            waited = up[name]
            if isinstance(waited, OrchestrRLError):
                found.setdefault(link, waited)
            elif interface in waited:
                found[link] = f"{interface} of {name} is down"
        return found

    async def _silent_ones(self, links: Collection[RoutedLink]) -> dict[RoutedLink, str]:
        """Return the circuits on which the expected router does not answer, each with the reason. Light alone does not
        identify the router at the far end."""
        hops: dict[EndpointId, dict[NextHop, RoutedLink]] = {}
        for link in links:
            (a, interface_a), (b, interface_b) = link.ends
            hops.setdefault(a, {})[NextHop(self.domain.routers[b].address, interface_a)] = link
            hops.setdefault(b, {})[NextHop(self.domain.routers[a].address, interface_b)] = link
        found = await self._find(hops)
        silent: dict[RoutedLink, str] = {}
        for name, answered in found.items():
            for hop, link in hops[name].items():
                if isinstance(answered, OrchestrRLError):
                    silent[link] = f"{name}: {answered}"
                elif hop not in answered:
                    silent[link] = f"{name} gets no answer from {hop.gateway} on {hop.interface}"
        return silent

    async def _find(
        self, hops: Mapping[EndpointId, Collection[NextHop]]
    ) -> dict[EndpointId, frozenset[NextHop] | OrchestrRLError]:
        """Return, for each router, the next hops that answer, or the router's error if it failed."""
        within_s = self._settings.neighbour_s
        return await self._each({name: self._routers[name].find(tuple(some), within_s) for name, some in hops.items()})

    async def _move(self, plan: pure.ReroutingPlan) -> _Moved:
        """Change every router's table to the table in the plan, and return the progress. The order of the changes
        ensures that every packet always has a route."""
        moved = _Moved(plan)
        await self._read_all(moved)
        want = {}
        for name, table in plan.tables.items():
            can = await self._routers[name].capabilities()
            want[name] = pure.fit(table, can.max_next_hops, can.max_weight)
        stuck = {(name, prefix) for name in moved.failed for prefix in {*want[name], *self._tables.get(name, {})}}
        while True:
            stages = await self._offload(lambda: pure.update(self.domain, self._tables, want, stuck))
            if await self._carry_out(stages, moved, stuck):
                return moved

    async def _carry_out(
        self, stages: Iterable[pure.RouteStage], moved: _Moved, stuck: set[tuple[EndpointId, str]]
    ) -> bool:
        """Apply the stages and return True. If routes cannot be changed, add them to `stuck` and return False after the
        current stage. The remaining changes must then be planned again without the routes in `stuck`."""
        for stage in stages:
            results = await self._each({name: self._routers[name].apply(some) for name, some in stage.items()})
            known = len(stuck)
            for name, applied in results.items():
                stuck |= self._note(name, stage[name], applied, moved)
            if len(stuck) > known:
                return False
        return True

    def _note(
        self, name: EndpointId, order: tuple[RouteChange, ...], applied: AppliedRoutes | OrchestrRLError, moved: _Moved
    ) -> set[tuple[EndpointId, str]]:
        """Record the routes that a router has changed. Return the (router, prefix) pairs of the routes that it failed
        to change."""
        if isinstance(applied, OrchestrRLError):
            moved.failed[name] = str(applied)
            if not isinstance(applied, Permanent | Retryable):
                moved.unread.add(name)
            return {(name, change.prefix) for change in order}
        routes = dict(self._tables[name])
        for change in applied.done:
            routes.pop(change.prefix, None)
            if change.route:
                routes[change.prefix] = change.route
        self._tables[name] = routes
        if applied.missing:
            moved.failed[name] = "; ".join(f"{change}: {applied.why}" for change in applied.missing)
        return {(name, change.prefix) for change in applied.missing}

    async def _read_all(self, moved: _Moved) -> None:
        read = await self._each({name: router.read() for name, router in self._routers.items()})
        for name, table in read.items():
            if isinstance(table, OrchestrRLError):
                moved.failed[name] = str(table)
                moved.unread.add(name)
            else:
                self._tables[name] = table

    def _still_using(self, going: Collection[RoutedLink], moved: _Moved) -> dict[EndpointId, str]:
        still: dict[EndpointId, str] = {}
        for name, interfaces in _interfaces(going).items():
            taken = {interface for route in self._tables[name].values() for interface in route.interfaces}
            used = interfaces if name in moved.unread else interfaces & taken
            if used:
                still[name] = f"{', '.join(sorted(used))}: {moved.failed.get(name, 'waits for another router')}"
        return still

    @staticmethod
    async def _each(calls: Mapping[EndpointId, Awaitable[T]]) -> dict[EndpointId, T | OrchestrRLError]:
        """Await all calls concurrently and return their results. If a call raises an OrchestrRLError, the error is
        returned as its result."""

        async def one(call: Awaitable[T]) -> T | OrchestrRLError:
            try:
                return await call
            except OrchestrRLError as error:
                return error

        results = await asyncio.gather(*(one(call) for call in calls.values()))
        return dict(zip(calls, results, strict=True))


def _interfaces(links: Iterable[RoutedLink]) -> dict[EndpointId, set[str]]:
    found: dict[EndpointId, set[str]] = {}
    for link in links:
        for name, interface in link.ends:
            found.setdefault(name, set()).add(interface)
    return found


def _listed(some: Mapping[Any, str]) -> str:
    return few([f"{what} ({why})" for what, why in sorted(some.items())], LISTED, ", ")
