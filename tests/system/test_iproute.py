"""The driver `iproute` on a real kernel, in a network namespace."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from namespaces import laboratory
from routers import LinuxRouter

from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.route_drivers.conformance import ONE, TWO, RouteDriverConformance, gone, put
from orchestrrl.fabric.route_drivers.driver import RouterDriver, make_driver
from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind


class TestIproute(RouteDriverConformance):
    options: ClassVar[dict[str, Any]] = {}
    table: ClassVar = "main"

    @pytest.fixture(autouse=True)
    def _router(self, tmp_path: Path) -> Iterator[None]:
        with laboratory() as lab:
            self.router = LinuxRouter(lab, tmp_path)
            yield

    async def make_driver(self) -> RouterDriver:
        return make_driver("iproute", "tor1", {"prefix": self.router.prefix, **self.options})

    async def inject(self, driver: RouterDriver, fault: RouterFault) -> None:
        if fault.kind is RouterFaultKind.FOREIGN_ROUTE:
            where = ("via", self.peer, "dev", "swp3", "onlink", "metric", "10", "table", self.table)
            self.router.inside("ip", "route", "add", fault.prefix, *where, "proto", "static")
        else:
            self.router.inject(fault)

    async def others(self, driver: RouterDriver) -> frozenset[str]:
        rows = json.loads(self.router.inside("ip", "-N", "-json", "-4", "route", "show", "table", "all"))
        is_ours = {"160", "2"}  # and the kernel's routes
        return frozenset(row["dst"] for row in rows if row.get("protocol") not in is_ours)

    async def test_own_route_coexists_with_another_of_the_same_prefix(self) -> None:
        async with self.device() as driver:
            self.router.inside("ip", "route", "add", ONE, "via", self.peer, "dev", "swp3", "onlink", "metric", "20")
            assert (await driver.apply([put(self.route(ONE, 1))])).missing == ()
            assert (await driver.apply([gone(ONE)])).missing == ()
            assert await self.others(driver) == {ONE}

    async def test_foreign_route_added_later_is_not_removed(self) -> None:
        async with self.device() as driver:
            wire: Any = driver._wire  # type: ignore[attr-defined]
            now = (await wire.read_routes()).table
            await self.break_it(driver, RouterFaultKind.FOREIGN_ROUTE, prefix=ONE)
            with pytest.raises(Permanent, match="File exists"):
                await wire.send([put(self.route(ONE, 1)), put(self.route(TWO, 1))], now)
            assert await self.others(driver) == {ONE}
            assert list(await driver.read()) == [TWO]

    async def test_foreign_route_is_not_owned(self) -> None:
        async with self.device() as driver:
            mark = ("proto", "160", "metric", "10", "table", self.table)
            self.router.inside("ip", "route", "add", "blackhole", ONE, *mark)
            await self.refused(driver, [put(self.route(ONE, 1))], ONE)


class TestIprouteOwnTable(TestIproute):
    options: ClassVar = {"table": 77}
    table: ClassVar = "77"


async def test_missing_namespace_is_reported() -> None:
    with laboratory() as lab:
        driver = make_driver("iproute", "tor1", {"prefix": ["ip", "netns", "exec", f"orl-{lab.token}-nosuch"]})
        with pytest.raises(Permanent, match=r"router tor1: reading routes failed: .*Cannot open network namespace"):
            await driver.read()


async def test_missing_program_is_reported() -> None:
    with pytest.raises(Permanent, match="cannot run /nosuch/ssh"):
        await make_driver("iproute", "tor1", {"prefix": ["/nosuch/ssh", "tor1"]}).read()
