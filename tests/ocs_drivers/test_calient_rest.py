"""The driver `calient_rest` and its emulator: the conformance suite, request counts, and failures."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from emulated import EmulatedConformance

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import carry_out, connected, refusal
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.calient_rest import CalientRestEmulator
from ocs_drivers.errors import DriverPermanent, InvalidOptions
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import BootBehaviour, CircuitChange, CrossConnect, PortStatus
from ocs_drivers.registry import make_driver

PANEL = DevicePanel(32, 32, reconfiguration_s=0.001)
FAST = {"bulk_s": 0.0, "conflict_s": 0.0}
ONE, TWO = CrossConnect(1, 9), CrossConnect(2, 10)


class TestCalientUni(EmulatedConformance):
    driver = "calient_rest"
    protocol = "calient_rest"
    panel = DevicePanel(320, 320, reconfiguration_s=0.002, boot=BootBehaviour.RESTORE)
    options: ClassVar[dict[str, Any]] = {"reconfiguration_s": 0.002, "port_source": "detail"}
    quirks: ClassVar[dict[str, Any]] = FAST


class TestCalientBi(EmulatedConformance):
    """Both directions, slow sets, jitter, chunked answers, a password, and a cookie that is valid for 5 requests."""

    driver = "calient_rest"
    protocol = "calient_rest"
    panel = DevicePanel(32, 32, reconfiguration_s=0.002, jitter_s=0.003)
    options: ClassVar[dict[str, Any]] = {
        "reconfiguration_s": 0.006,
        "dir": "bi",
        "user": "admin",
        "password": "pxc***",
    }
    quirks: ClassVar[dict[str, Any]] = {
        "bulk_s": 0.002,
        "conflict_s": 0.005,
        "chunked": True,
        "cookie_uses": 5,
        "user": "admin",
        "password": "pxc***",
    }


@asynccontextmanager
async def switch(
    quirks: dict[str, Any] | None = None, panel: DevicePanel = PANEL, **options: Any
) -> AsyncIterator[tuple[OcsDriver, CalientRestEmulator, str]]:
    emulator = CalientRestEmulator(panel, **{**FAST, **(quirks or {})})
    address = await emulator.start()
    driver = make_driver("calient_rest", "ocs1", {"address": address, "reconfiguration_s": 0.001, **options})
    try:
        yield driver, emulator, address
    finally:
        await driver.close()
        await emulator.stop()


async def test_320_ports_need_one_badd_and_one_bdel() -> None:
    async with switch(panel=DevicePanel(320, 320, reconfiguration_s=0.001)) as (driver, emulator, _):
        pairs = tuple(CrossConnect(port, 321 - port) for port in range(1, 321))
        assert (await carry_out(driver, pairs)).commands_sent == 1
        assert (await carry_out(driver, disconnect=pairs[1:])).commands_sent == 1
        assert [command.split()[0] for command in emulator.device.setters] == ["badd", "bdel"]
        assert await connected(driver) == {pairs[0]}


async def test_failure_inside_http_200_is_reported_per_item() -> None:
    async with switch() as (driver, emulator, _):
        diff = await driver.plan(CircuitChange((ONE, TWO)))
        emulator.device.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 10))
        result = await driver.commit(diff, diff.revision)
        assert [item.done for item in result.items] == [True, False]
        assert "the request failed for 1 of 2 connections" in result.items[1].detail
        assert "1.1.2>1.2.2: FAILED: PORT 10 FAILED" in result.items[1].detail
        states = {port.port: port.status for port in await driver.ports()}
        assert states[10] is PortStatus.FAILED
        emulator.device.inject(DeviceFault(DeviceFaultKind.MEND_PORT, 10))
        emulator.device.inject(DeviceFault(DeviceFaultKind.DISABLE_PORT, 10))
        states = {port.port: port.status for port in await driver.ports()}
        assert states[10] is PortStatus.DISABLED


async def test_wrong_password_is_permanent_and_not_shown() -> None:
    async with switch({"user": "admin", "password": "pxc***"}, user="admin", password="guess") as (driver, _, _address):
        async with refusal(DriverPermanent, "user and password") as refused:
            await driver.ports()
        assert "guess" not in str(refused[0])


async def test_changed_port_list_is_refused() -> None:
    async with switch() as (driver, emulator, _):
        await carry_out(driver, (ONE,))
        emulator._names = type(emulator._names)([*emulator._names.names, "1.0.1"])
        async with refusal(DriverPermanent, "different ports than before (2 differ, the first is 1.0.1)"):
            await driver.ports()


async def test_unexpected_port_count_is_refused() -> None:
    async with switch(ports=320) as (driver, _, _address):
        async with refusal(DriverPermanent, "has 32 ports, but the option `ports` is 320"):
            await driver.facts()


async def test_summary_source_reports_no_power() -> None:
    async with switch(port_source="summary") as (driver, _, _address):
        assert not (await driver.capabilities()).port_power
        assert {port.power_dbm for port in await driver.ports()} == {None}


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"dir": "both"}, "options.dir: must be one of uni, bi, got 'both'"),
        ({"ports": 1}, "options.ports: must be a whole number >= 2, got 1"),
        ({"group": 7}, "options.group: must be text, got 7"),
        ({"port_source": "tl1"}, "options.port_source: must be one of detail, summary, got 'tl1'"),
        ({"tls_verify": "no"}, "options.tls_verify: must be true or false, got 'no'"),
    ],
)
def test_invalid_options_are_reported_by_name(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidOptions) as refused:
        make_driver("calient_rest", "ocs1", {"address": "lab", **options})
    assert fault in str(refused.value)
