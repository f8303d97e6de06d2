"""Run the conformance suite on the driver `scpi`, against emulated switches with different quirks."""

from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from ocs_drivers.conformance import carry_out, connected
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.scpi import polatis
from ocs_drivers.errors import InvalidOptions
from ocs_drivers.faults import DeviceFaultKind
from ocs_drivers.model import BootBehaviour, CrossConnect
from ocs_drivers.registry import make_driver
from tests.ocs_drivers.emulated import EmulatedConformance

FAST = DevicePanel(reconfiguration_s=0.002)


class TestScpi(EmulatedConformance):
    """A Polatis that lists a connection once it is in place."""

    driver = "scpi"
    protocol = "scpi"


class TestScpiDicon(EmulatedConformance):
    """A DiCon with difficult quirks: a single session, CRLF, slow mirrors, short lines, circuits that survive a
    restart."""

    splits_bulk = "lines of 64 characters"
    driver = "scpi"
    protocol = "scpi-dicon"
    options: ClassVar[dict[str, Any]] = {
        "profile": "dicon",
        "line_end": "crlf",
        "longest_line_chars": 2000,
        "boot": "restore",
        "reconfiguration_s": 0.006,
    }
    panel: ClassVar[DevicePanel] = DevicePanel(
        reconfiguration_s=0.002, jitter_s=0.004, boot=BootBehaviour.RESTORE, seed=7
    )
    quirks: ClassVar[dict[str, Any]] = {"one_session": True, "longest_line_chars": 2000, "lists_at_once": True}
    cannot = MappingProxyType(
        {DeviceFaultKind.STICK_MIRROR: "this switch lists a connection on command, regardless of its mirrors"}
    )


async def test_whole_device_is_one_line() -> None:
    ports = 160
    emulator = polatis(DevicePanel(ports, ports, reconfiguration_s=0.002))
    driver = make_driver("scpi", "ocs1", {"address": await emulator.start()})
    pairs = tuple(CrossConnect(port, 2 * ports + 1 - port) for port in range(1, ports + 1))
    result = await carry_out(driver, pairs)
    assert (result.done, result.commands_sent) == (True, 1)
    ingress = ",".join(str(pair.ingress_port) for pair in pairs)
    egress = ",".join(str(pair.egress_port) for pair in pairs)
    assert emulator.device.setters == [f":oxc:swit:conn:add (@{ingress}),(@{egress})"]
    assert len(await driver.ports()) == 2 * ports
    assert (await carry_out(driver, disconnect=pairs)).done
    assert emulator.device.setters[1] == f":oxc:swit:conn:sub (@{ingress}),(@{egress})"
    await driver.close()
    await emulator.stop()


async def test_short_input_buffer_is_reported_and_configurable() -> None:
    emulator = polatis(DevicePanel(64, 64, reconfiguration_s=0.002), longest_line_chars=100)
    address = await emulator.start()
    pairs = tuple(CrossConnect(port, port + 64) for port in range(1, 65))
    driver = make_driver("scpi", "ocs1", {"address": address, "port_states": False})
    result = await carry_out(driver, pairs)
    assert not result.done
    assert "-363 Input buffer overrun" in result.items[0].detail
    await driver.close()
    short = make_driver("scpi", "ocs1", {"address": address, "longest_line_chars": 100})
    assert (await carry_out(short, pairs)).done
    assert max(map(len, emulator.device.setters)) <= 100
    assert len(emulator.device.setters) > 4
    assert await connected(short) == frozenset(pairs)
    await short.close()
    await emulator.stop()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"address": "lab:0"}, "options.address: must be HOST or HOST:PORT, got 'lab:0'"),
        ({"profile": "calient"}, "options.profile: must be one of polatis, dicon, got 'calient'"),
        ({"line_end": "cr"}, "options.line_end: must be one of lf, crlf, got 'cr'"),
        ({"longest_line_chars": 63}, "options.longest_line_chars: must be a whole number >= 64, got 63"),
        ({"port_states": "no"}, "options.port_states: must be true or false, got 'no'"),
        ({"boot": "bright"}, "options.boot: must be one of dark, restore, unknown, got 'bright'"),
        ({"reconfiguration_s": -1}, "options.reconfiguration_s: must be a number >= 0, got -1"),
        ({"command_timeout_s": 0}, "options.command_timeout_s: must be a number > 0, got 0"),
        (
            {"ingress_ports": "1..16"},
            "options.egress_ports: must be FIRST..LAST, and be given for both sides, got None",
        ),
        (
            {"ingress_ports": "16..1", "egress_ports": "17..32"},
            "options.ingress_ports: must be FIRST..LAST, and be given for both sides, got '16..1'",
        ),
    ],
)
def test_invalid_options_are_reported_by_name(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidOptions) as refused:
        make_driver("scpi", "ocs1", {"address": "192.0.2.7", **options})
    assert refused.value.faults == [wrong]


@pytest.mark.parametrize(
    ("quirks", "wrong"),
    [
        ({"error_queue": 1}, "error_queue: must be a whole number >= 2, got 1"),
        ({"longest_line_chars": True}, "longest_line_chars: must be a whole number >= 1, got True"),
        ({"crlf": "yes"}, "crlf: must be true or false, got 'yes'"),
        ({"unknown": "*IDN?"}, "unknown: must be a list out of [*]IDN[?], .*, got '[*]IDN[?]'"),
    ],
)
def test_invalid_quirks_are_refused(quirks: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidOptions, match=wrong.replace("?", "[?]") if "[" not in wrong else wrong):
        polatis(FAST, **quirks)
