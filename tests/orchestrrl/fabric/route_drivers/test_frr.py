"""Test the driver `frr` on a real zebra and staticd, in their own network namespace and run directory."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from namespaces import laboratory
from routers import LinuxRouter

from orchestrrl.core.errors import Retryable
from orchestrrl.fabric.route_drivers.conformance import ONE, TWO, RouteDriverConformance, gone, put
from orchestrrl.fabric.route_drivers.driver import RouterDriver, make_driver
from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind

DAEMONS = Path("/usr/lib/frr")


class TestFrr(RouteDriverConformance):
    options: Mapping[str, Any] = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _router(self, tmp_path: Path) -> Iterator[None]:
        if not (DAEMONS / "zebra").exists() or shutil.which("vtysh") is None:
            pytest.skip("FRRouting is not installed (Debian: apt-get install frr)")
        with laboratory() as lab:
            self.router = LinuxRouter(lab, tmp_path)
            (tmp_path / "vtysh.conf").touch()
            self.vtysh = ["--vty_socket", str(tmp_path), "--config_dir", str(tmp_path)]
            try:
                self.start("zebra", "-P", "0")
                self.start("staticd", "-P", "0")
                self.configure("ip route 192.0.2.0/24 Null0")  # required by the driver
                self.wait(lambda: "192.0.2.0/24" in self.router.inside("ip", "route"), "staticd does not work")
                yield
            finally:
                for pid in tmp_path.glob("*.pid"):
                    os.kill(int(pid.read_text()), signal.SIGTERM)

    def start(self, daemon: str, *arguments: str) -> None:
        """Start the daemon and return once its terminal listens."""
        folder = self.router.folder
        places = ("-z", folder / "zserv.api", "-i", folder / f"{daemon}.pid", "--vty_socket", folder, "-f", "/dev/null")
        log = ("--log", f"file:{folder / daemon}.log")
        arguments = ("-d", *arguments, "--user", "root", "--group", "frrvty", *map(str, places), *log)
        self.router.inside(str(DAEMONS / daemon), *arguments)
        self.wait((folder / f"{daemon}.vty").exists, f"{daemon} does not start")

    def wait(self, until: Callable[[], bool], fault: str) -> None:
        deadline_s = time.monotonic() + 60.0
        while not until():
            assert time.monotonic() < deadline_s, fault
            time.sleep(0.01)

    async def make_driver(self) -> RouterDriver:
        options = {"prefix": self.router.prefix, "vtysh_arguments": self.vtysh, **self.options}
        return make_driver("frr", "tor1", options)

    def configure(self, *lines: str) -> str:
        arguments = [argument for line in ("configure terminal", *lines) for argument in ("-c", line)]
        return self.router.inside("vtysh", *self.vtysh, *arguments)

    async def inject(self, driver: RouterDriver, fault: RouterFault) -> None:
        if fault.kind is RouterFaultKind.FOREIGN_ROUTE:
            self.configure(f"ip route {fault.prefix} {self.peer} swp3 onlink")
        else:
            self.router.inject(fault)

    async def others(self, driver: RouterDriver) -> frozenset[str]:
        shown = self.router.inside("vtysh", *self.vtysh, "-c", "show running-config")
        lines = [line.split() for line in shown.splitlines() if line.startswith("ip route ")]
        return frozenset(arguments[2] for arguments in lines if "160" not in arguments)

    async def test_kernel_forwards_by_applied_routes(self) -> None:
        async with self.device() as driver:
            assert (await driver.apply([put(self.route(ONE, 1, 1))])).missing == ()
            shown = self.router.inside("ip", "route", "show", ONE)
            assert shown.count(f"via {self.peer} dev swp") == 2

    async def test_distance_option_is_applied(self) -> None:
        self.options = {"distance": 18}
        async with self.device() as driver:
            for route in (self.route(ONE, 1, 1), self.route(ONE, 0, 1)):
                assert (await driver.apply([put(route)])).missing == ()
            assert "tag 160 18 onlink" in self.router.inside("vtysh", *self.vtysh, "-c", "show running-config")
            assert (await driver.apply([gone(ONE)])).missing == ()
            assert await self.others(driver) == {"192.0.2.0/24"}

    async def test_route_over_failed_link_can_change(self) -> None:
        async with self.device() as driver:
            await driver.apply([put(self.route(ONE, 1, 1)), put(self.route(TWO, 1))])
            self.router.inside("ip", "link", "set", "swp1", "down")
            assert (await driver.apply([put(self.route(ONE, 0, 1)), put(self.route(TWO, 0, 1))])).missing == ()
            assert "swp1" not in self.router.inside("vtysh", *self.vtysh, "-c", "show running-config")

    async def test_requests_can_be_retried_after_daemons_stopped(self) -> None:
        async with self.device() as driver:
            pid = self.router.folder / "staticd.pid"
            os.kill(int(pid.read_text()), signal.SIGKILL)
            pid.unlink()
            with pytest.raises(Retryable, match="router tor1: reading routes failed: vtysh"):
                await driver.read()
