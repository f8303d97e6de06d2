"""The conformance suite that every route driver must pass. To use it, subclass it, override its hooks, and run pytest
(asyncio mode auto):

    class TestMyRouter(RouteDriverConformance):
        async def make_driver(self) -> RouterDriver:
            return MyRouter("lab1", address="192.0.2.7")

        async def inject(self, driver: RouterDriver, fault: RouterFault) -> None: ...

        async def others(self, driver: RouterDriver) -> frozenset[str]: ...

The router must have the three interfaces in `interfaces`, all of them up, and no routes of the driver. At the far end
of each interface, a router must answer for the address `peer`. Each test creates a driver and closes it.
`cannot_inject` maps each kind of fault that cannot be injected to the reason. Tests that need such a fault are skipped.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from unittest import SkipTest

from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.route_drivers.base import RouterCapabilities
from orchestrrl.fabric.route_drivers.driver import RouterDriver
from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind
from planner.fabric.route_plan import NextHop, PacketRoute, RouteChange, route_table

ONE, TWO, THREE = "10.0.1.0/24", "10.0.2.0/24", "10.0.3.3/32"
FAR_S = 60.0  # limit for an expected event, never reached
NEAR_S = 0.1  # limit for an event that must not happen


def put(route: PacketRoute) -> RouteChange:
    return RouteChange(route.prefix, route)


def gone(prefix: str) -> RouteChange:
    return RouteChange(prefix, None)


class RouteDriverConformance:
    """Conformance tests for a route driver. The module's docstring describes how to use them."""

    interfaces: tuple[str, str, str] = ("swp1", "swp2", "swp3")
    peer: str = "192.0.2.2"
    cannot_inject: Mapping[RouterFaultKind, str] = MappingProxyType({})

    async def make_driver(self) -> RouterDriver:
        """Return a driver for a router that meets the requirements in the module's docstring. Subclasses must override
        this method."""
        raise AssertionError("this harness must override make_driver")

    async def inject(self, driver: RouterDriver, fault: RouterFault) -> None:
        """Cause a fault of the driver's router. Subclasses must override this method, or list all kinds of faults in
        `cannot_inject`."""
        raise AssertionError(f"this harness must inject {fault.kind} or list it in cannot_inject")

    async def others(self, driver: RouterDriver) -> frozenset[str]:
        """Return the prefixes of foreign routes on the driver's router. Subclasses must override this method."""
        raise AssertionError("this harness must override others")

    @asynccontextmanager
    async def device(self) -> AsyncIterator[RouterDriver]:
        driver = await self.make_driver()
        try:
            yield driver
        finally:
            await driver.close()

    async def break_it(
        self, driver: RouterDriver, kind: RouterFaultKind, interface: str = "", prefix: str = ""
    ) -> None:
        if kind in self.cannot_inject:
            raise SkipTest(f"{kind}: {self.cannot_inject[kind]}")
        await self.inject(driver, RouterFault(kind, interface, prefix))

    def route(self, prefix: str, *weights: int) -> PacketRoute:
        """Return a route to `prefix`. The weights apply to the interfaces in order. Interfaces with weight 0 or without
        a weight are not used."""
        ways = zip(self.interfaces, weights, strict=False)
        return PacketRoute.of(prefix, {(self.peer, interface): weight for interface, weight in ways if weight})

    def weighted(self, can: RouterCapabilities) -> tuple[int, int]:
        return (3, 2) if can.max_weight >= 3 else (1, 1)

    # Routes.

    async def test_routes_are_made_changed_and_removed(self) -> None:
        async with self.device() as driver:
            assert await driver.read() == {}
            weights = self.weighted(await driver.capabilities())
            first = (self.route(ONE, 1), self.route(TWO, *weights), self.route(THREE, 0, 1, 1))
            applied = await driver.apply([put(route) for route in first])
            assert (len(applied.done), applied.missing, applied.sent) == (3, (), 3)
            assert await driver.read() == route_table(first)
            second = (self.route(ONE, 0, 1, 1), self.route(TWO, 0, 0, 1))
            applied = await driver.apply([*(put(route) for route in second), gone(THREE)])
            assert (applied.missing, applied.sent) == ((), 3)
            assert await driver.read() == route_table(second)

    async def test_apply_sends_nothing_for_changes_in_place(self) -> None:
        async with self.device() as driver:
            changes = [put(self.route(ONE, 1, 1)), gone(TWO)]
            assert (await driver.apply(changes)).sent == 1
            again = await driver.apply(changes)
            assert (again.done, again.missing, again.sent) == (tuple(changes), (), 0)
            assert (await driver.apply([])).sent == 0

    async def test_concurrent_writers_all_succeed(self) -> None:
        async with self.device() as driver:
            routes = [self.route(prefix, 1) for prefix in (ONE, TWO, THREE)]
            results = await asyncio.gather(*(driver.apply([put(route)]) for route in routes))
            assert all(result.missing == () for result in results)
            assert await driver.read() == route_table(routes)

    async def test_driver_never_touches_foreign_routes(self) -> None:
        async with self.device() as driver:
            await driver.apply([put(self.route(TWO, 1))])
            before = await self.others(driver)
            await self.break_it(driver, RouterFaultKind.FOREIGN_ROUTE, prefix=ONE)
            assert await self.others(driver) == before | {ONE}
            for change in (put(self.route(ONE, 1)), put(self.route(ONE, 1, 1))):
                await self.refused(driver, [change, put(self.route(TWO, 0, 1))], ONE)
            assert (await driver.apply([gone(ONE)])).sent == 0  # the driver has no route there, as requested
            assert (await driver.apply([gone(TWO)])).missing == ()
            assert await driver.read() == {}
            assert await self.others(driver) == before | {ONE}

    async def test_driver_rejects_unsupported_routes_before_sending(self) -> None:
        async with self.device() as driver:
            can = await driver.capabilities()
            heavy = self.route(ONE, can.max_weight + 1, 1)
            ways = {(self.peer, f"swp{n}"): 1 for n in range(can.max_next_hops + 1)}
            await self.refused(driver, [put(heavy), put(PacketRoute.of(TWO, ways))], ONE, TWO)
            await self.refused(driver, [put(self.route(ONE, 1)), gone(ONE)], "twice")
            assert await driver.read() == {}

    async def refused(self, driver: RouterDriver, changes: list[RouteChange], *texts: str) -> None:
        table = await driver.read()
        refusal = ""
        try:
            await driver.apply(changes)
        except Permanent as error:
            refusal = str(error)
        assert refusal, "expected Permanent, nothing was raised"
        unnamed = [text for text in (driver.router, *texts) if text not in refusal]
        assert not unnamed, f"{unnamed} missing in: {refusal}"
        assert await driver.read() == table

    async def test_apply_reports_failed_changes_and_applies_the_rest(self) -> None:
        async with self.device() as driver:
            nowhere = PacketRoute.of(ONE, {(self.peer, "nosuch0"): 1})
            applied = await driver.apply([put(nowhere), put(self.route(TWO, 1))])
            assert [change.prefix for change in applied.missing] == [ONE]
            assert applied.why
            assert [change.prefix for change in applied.done] == [TWO]
            await driver.apply([gone(ONE)])  # a router may store a route that it cannot use yet
            assert await driver.read() == route_table([self.route(TWO, 1)])

    # Broken connections.

    async def test_a_connection_lost_after_the_change_is_read_back_as_done(self) -> None:
        async with self.device() as driver:
            await self.break_it(driver, RouterFaultKind.DROP_CONNECTION)
            applied = await driver.apply([put(self.route(ONE, 1))])
            assert applied.missing == ()
            assert await driver.read() == route_table([self.route(ONE, 1)])

    async def test_a_connection_lost_before_the_change_is_read_back_as_missing(self) -> None:
        async with self.device() as driver:
            await self.break_it(driver, RouterFaultKind.DROP_COMMAND)
            applied = await driver.apply([put(self.route(ONE, 1))])
            assert [change.prefix for change in applied.missing] == [ONE]
            assert await driver.read() == {}
            assert (await driver.apply([put(self.route(ONE, 1))])).missing == ()

    # Links and neighbours.

    async def test_wait_up_returns_at_once_if_links_are_up(self) -> None:
        async with self.device() as driver:
            links = await driver.links()
            assert all(links[interface] for interface in self.interfaces)
            assert await driver.wait_up(self.interfaces, FAR_S) == frozenset()

    async def test_wait_up_returns_links_that_stay_down(self) -> None:
        async with self.device() as driver:
            await self.break_it(driver, RouterFaultKind.LINK_DOWN, self.interfaces[0])
            assert not (await driver.links())[self.interfaces[0]]
            began_s = driver._clock.now_s()
            assert await driver.wait_up((*self.interfaces[:2], "nosuch0"), NEAR_S) == {self.interfaces[0], "nosuch0"}
            assert driver._clock.now_s() - began_s >= NEAR_S

    async def test_wait_up_ends_when_a_link_comes_up(self) -> None:
        async with self.device() as driver:
            await self.break_it(driver, RouterFaultKind.LINK_DOWN, self.interfaces[0])
            waiting = asyncio.ensure_future(driver.wait_up(self.interfaces, FAR_S))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await self.break_it(driver, RouterFaultKind.LINK_UP, self.interfaces[0])
            assert await waiting == frozenset()

    async def test_find_returns_answering_next_hops(self) -> None:
        async with self.device() as driver:
            there = [NextHop(self.peer, interface) for interface in self.interfaces]
            stranger = NextHop("192.0.2.99", self.interfaces[0])
            assert await driver.find(there, FAR_S) == frozenset(there)
            assert await driver.find([there[0], stranger], NEAR_S) == {there[0]}
            assert await driver.find([], NEAR_S) == frozenset()
