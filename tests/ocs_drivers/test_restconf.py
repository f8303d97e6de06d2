"""The driver `restconf` and its emulator: the conformance suite, request counts, and failures."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from emulated import EmulatedConformance

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import carry_out, connected, refusal
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.http import EmulatedReply
from ocs_drivers.emulators.restconf import RestconfEmulator
from ocs_drivers.errors import DriverPermanent, DriverRetryable, InvalidOptions
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import BootBehaviour, ChangeMode, CircuitChange, CrossConnect
from ocs_drivers.registry import make_driver

PANEL = DevicePanel(16, 16, reconfiguration_s=0.001)
ONE, TWO = CrossConnect(1, 17), CrossConnect(2, 18)


class TestRestconf(EmulatedConformance):
    """YANG Patch, which the server announces; jitter, pairs listed late, chunked answers; circuits survive restarts."""

    driver = "restconf"
    protocol = "restconf"
    panel = DevicePanel(reconfiguration_s=0.002, jitter_s=0.003, boot=BootBehaviour.RESTORE)
    options: ClassVar[dict[str, Any]] = {"reconfiguration_s": 0.006}
    quirks: ClassVar[dict[str, Any]] = {"lists_late": True, "chunked": True}


class TestRestconfOld(EmulatedConformance):
    """An old model: plain PATCH and one DELETE for each pair, with power monitors and a password."""

    driver = "restconf"
    protocol = "restconf"
    cannot = MappingProxyType({"make_big": "a thousand single requests test no more than 32 do"})
    options: ClassVar[dict[str, Any]] = {
        "reconfiguration_s": 0.002,
        "user": "admin",
        "password": "rööt",
        "power": True,
    }
    quirks: ClassVar[dict[str, Any]] = {
        "revision": "2017-06-13",
        "yang_patch": False,
        "power": True,
        "user": "admin",
        "password": "rööt",
    }


@asynccontextmanager
async def switch(
    quirks: dict[str, Any] | None = None, panel: DevicePanel = PANEL, **options: Any
) -> AsyncIterator[tuple[OcsDriver, RestconfEmulator, str]]:
    emulator = RestconfEmulator(panel, **(quirks or {}))
    address = await emulator.start()
    driver = make_driver("restconf", "ocs1", {"address": address, "reconfiguration_s": 0.001, **options})
    try:
        yield driver, emulator, address
    finally:
        await driver.close()
        await emulator.stop()


@pytest.mark.parametrize(
    ("options", "quirks", "first", "then"),
    [
        ({}, {}, ["YANG-PATCH"], ["YANG-PATCH"]),
        ({}, {"yang_patch": False}, ["PATCH"], ["DELETE"] * 159),
        ({"change_with": "single"}, {}, ["POST"] * 160, ["DELETE"] * 159),
    ],
)
async def test_number_of_requests_for_320_ports(
    options: dict[str, Any], quirks: dict[str, Any], first: list[str], then: list[str]
) -> None:
    async with switch(quirks, DevicePanel(160, 160, reconfiguration_s=0.001), **options) as (driver, emulator, _):
        pairs = tuple(CrossConnect(port, 160 + port) for port in range(1, 161))
        assert (await carry_out(driver, pairs)).commands_sent == len(first)
        assert [command.split()[0] for command in emulator.device.setters] == first
        assert (await carry_out(driver, disconnect=pairs[1:])).commands_sent == len(then)
        assert [command.split()[0] for command in emulator.device.setters[len(first) :]] == then
        assert await connected(driver) == {pairs[0]}


async def test_overwrite_does_not_replace_collection() -> None:
    async with switch() as (driver, emulator, _):
        await carry_out(driver, (ONE, TWO))
        assert (await carry_out(driver, (ONE,), mode=ChangeMode.OVERWRITE)).done
        assert [command for command in emulator.device.setters if command.startswith(("PUT", "DELETE all"))] == []


@pytest.mark.parametrize(("way", "refused"), [("yang_patch", [ONE, TWO]), ("single", [TWO]), ("patch", [])])
async def test_port_connected_by_another_client_after_reading(way: str, refused: list[CrossConnect]) -> None:
    """Check that the switch refuses the port. A plain patch re-routes it instead, as documented."""
    theirs = CrossConnect(2, 20)
    async with switch(change_with=way) as (driver, emulator, _):
        diff = await driver.plan(CircuitChange((ONE, TWO)))
        answer, times = emulator._dispatch, []

        async def dispatch(method: str, path: str, body: bytes) -> EmulatedReply:
            if method == "GET" and path.endswith("cross-connects"):
                times.append(path)
                reply = await answer(method, path, body)
                if len(times) == 1:  # the commit has read the device; another client now connects first
                    emulator.device.add((theirs,))
                return reply
            return await answer(method, path, body)

        emulator._dispatch = dispatch
        result = await driver.commit(diff, diff.revision)
        assert [item.cross_connect for item in result.items if not item.done] == refused
        assert all("data-exists: port 2 is connected" in item.detail for item in result.items if not item.done)
        assert (theirs in await connected(driver)) is bool(refused)


async def test_facts_are_read_from_the_model() -> None:
    async with switch(panel=DevicePanel(8, 24, boot=BootBehaviour.RESTORE)) as (driver, _, _address):
        facts = await driver.facts()
        assert (facts.vendor, facts.model, facts.serial) == ("Polatis", "I-OST-8x24-LU1-DMHNS", "002414")
        assert (facts.ingress_ports, facts.egress_ports) == (range(1, 9), range(9, 33))
        assert facts.boot is BootBehaviour.RESTORE
    async with switch(size="8x8") as (driver, _, _address):
        async with refusal(DriverPermanent, "option `size`", "ports 1..16", "32 ports from 1 to 32"):
            await driver.facts()


async def test_refusals_report_switch_message() -> None:
    async with switch() as (driver, emulator, _):
        diff = await driver.plan(CircuitChange((ONE, TWO)))
        emulator.device.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 18))
        result = await driver.commit(diff, diff.revision)
        assert "resource-denied: PORT 18 FAILED" in result.items[1].detail
    async with switch({"user": "admin", "password": "root"}, user="admin", password="guess") as (driver, _, _address):
        async with refusal(DriverPermanent, "user and password") as refused:
            await driver.ports()
        assert "guess" not in str(refused[0])
    async with switch(root="/restconf") as (driver, _, _address):
        async with refusal(DriverPermanent, "option `root`"):
            await driver.facts()


def answering(emulator: RestconfEmulator, told: dict[str, object]) -> None:
    """Answer a GET of each named resource with the given body."""
    dispatch = emulator._dispatch

    async def answer(method: str, path: str, body: bytes) -> EmulatedReply:
        name = path.rpartition(":")[2]
        return EmulatedReply(200, told[name]) if name in told else await dispatch(method, path, body)

    emulator._dispatch = answer  # type: ignore[method-assign]


STARTING: dict[str, object] = {"status": {"state": "starting"}}


@pytest.mark.parametrize("body", [{}, STARTING, {"optical-switch:NAME": None}])
@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("cross-connects", "cross_connects"),
        ("port-config", "ports"),
        ("opm-power", "ports"),
        ("product-information", "facts"),
        ("modules-state", "facts"),
        ("restconf-state/capabilities", "facts"),
    ],
)
async def test_answer_without_requested_container_is_refused(name: str, verb: str, body: dict[str, object]) -> None:
    """Check that a body without the requested container is not read as an empty one."""
    told = {key.replace("NAME", name): value for key, value in body.items()}
    async with switch({"power": True}, power=True) as (driver, emulator, _):
        answering(emulator, {name: told})
        async with refusal(DriverPermanent, "invalid response", f"must contain an object {name.rpartition('/')[2]}"):
            await getattr(driver, verb)()


async def test_facts_do_not_need_startup_mode() -> None:
    async with switch() as (driver, emulator, _):
        answering(emulator, {"startup-mode": {}})
        assert (await driver.facts()).boot is BootBehaviour.UNKNOWN


async def test_unknown_port_status_fails_only_ports() -> None:
    async with switch() as (driver, emulator, _):
        emulator.device.add((ONE,))
        ports = [{"port-id": port, "status": "WARMING" if port == 3 else "ENABLED"} for port in range(1, 33)]
        answering(emulator, {"port-config": {"optical-switch:port-config": {"port": ports}}})
        assert len((await driver.facts()).ingress_ports) == 16
        assert await connected(driver) == {ONE}
        async with refusal(DriverPermanent, "WARMING"):
            await driver.ports()


async def test_unreachable_switch_is_retryable() -> None:
    driver = make_driver("restconf", "ocs1", {"address": "127.0.0.1:1"})
    async with refusal(DriverRetryable, "ocs1", "the connection failed"):
        await driver.cross_connects()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"address": "a b"}, "options.address: must be HOST or HOST:PORT, got 'a b'"),
        ({"address": "lab", "scheme": "ftp"}, "options.scheme: must be one of http, https, got 'ftp'"),
        ({"address": "lab", "tls_ca_file": "/nowhere"}, "options.tls_ca_file: needs scheme https and tls_verify"),
        ({"address": "lab", "scheme": "https", "tls_ca_file": "/nowhere"}, "options.tls_ca_file: cannot be used"),
        ({"address": "lab", "user": "a:b"}, "options.user: must be without a colon, got 'a:b'"),
        ({"address": "lab", "password": "x"}, "options.user: must be set when password is given, got ''"),
        ({"address": "lab", "size": "big"}, "options.size: must be 16x16, or 32xCC for any-to-any, got 'big'"),
        ({"address": "lab", "yang_revision": "new"}, "yang_revision: must be a date such as 2017-08-04, got 'new'"),
        (
            {"address": "lab", "change_with": "put"},
            "options.change_with: must be one of auto, yang_patch, patch, single, got 'put'",
        ),
        ({"address": "lab", "root": "api"}, "options.root: must be a path from /, got 'api'"),
    ],
)
def test_invalid_options_are_reported_by_name(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidOptions) as refused:
        make_driver("restconf", "ocs1", options)
    assert fault in str(refused.value)
