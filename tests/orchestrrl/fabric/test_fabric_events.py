"""Switches that send events are polled at once, and failures are avoided, however they are detected."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from fabric_harness import ACROSS_RAILS, OVER_CORE, Harness, harness

from ocs_drivers.errors import DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import CircuitState, Connectivity, DeviceCircuit, EventKind, SwitchEvent
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.clock import VirtualClock
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.fabric.switch_events import LONGEST_PAUSE_S, SwitchEvents
from planner.fabric.model import OcsId, PortPair


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path) as site:
        site.agent("n0", range(16))
        await site.pass_time(0.1)
        await site.in_window(OVER_CORE)
        yield site


def one(site: Harness, switch: str = "core0") -> PortPair:
    return min(pair for pair in site.up() if pair.switch == switch)


async def quiet(site: Harness, duration_s: float) -> None:
    """Keep windows open."""
    for _ in range(round(duration_s / 0.5)):
        for agent in site.agents:
            agent.quiet(60.0)
        await site.pass_time(0.5)


async def test_failed_port_is_avoided_before_next_poll(site: Harness) -> None:
    events = SwitchEvents(site.switches, site.clock, lambda _: site.coordinator.poll_soon())
    listening = asyncio.create_task(events.run())
    await quiet(site, 1.0)
    pair = one(site)
    site.fail("core0", DeviceFault(DeviceFaultKind.FAIL_PORT, pair.port_a))
    await quiet(site, 3.0)
    assert (OcsId("core0"), pair.port_a) in site.coordinator.site_reading.failures.ports
    assert pair not in site.up()
    listening.cancel()


async def test_port_failed_while_period_waits_is_not_tried_in_window(site: Harness) -> None:
    """The period is planned again, so that the window is not spent on discovering the failure."""
    events = SwitchEvents(site.switches, site.clock, lambda _: site.coordinator.poll_soon())
    listening = asyncio.create_task(events.run())
    for agent in site.agents:
        agent.busy()
    period = site.coordinator.expect(ACROSS_RAILS)
    await site.pass_time(0.5)
    assert period.report.state is PeriodState.WAITING
    first = site.plans[-1][1].cross_connects
    port = min(pair for pair in first - site.up())
    site.fail(port.switch, DeviceFault(DeviceFaultKind.FAIL_PORT, port.port_a))
    await site.pass_time(0.5)
    assert period.report.state is PeriodState.WAITING
    assert port not in site.plans[-1][1].cross_connects
    for agent in site.agents:
        agent.quiet(60.0)
    report = await site.over(period)
    assert report.state is PeriodState.COMMITTED, report
    assert all(commit.done for commit in report.commits)
    listening.cancel()


async def test_port_failed_while_another_switch_was_silent_is_avoided(site: Harness) -> None:
    pair = one(site)
    silent = site.switches[next(id for id in site.switches if id != "core0")]
    ports = silent.ports

    async def no_answer() -> NoReturn:
        raise DriverRetryable("no route to host")

    silent.ports = no_answer  # type: ignore[method-assign]
    site.fail("core0", DeviceFault(DeviceFaultKind.FAIL_PORT, pair.port_a))
    await quiet(site, 15.0)
    assert silent.device in site.coordinator.site_reading.unread
    assert pair in site.up()
    silent.ports = ports  # type: ignore[method-assign]
    await quiet(site, 15.0)
    assert pair not in site.up()


@pytest.mark.parametrize("connectivity", list(Connectivity))
async def test_failed_circuit_carries_nothing(tmp_path: Path, connectivity: Connectivity) -> None:
    """The switch reports its ports as healthy."""
    async with harness(tmp_path, connectivity=connectivity) as site:
        site.agent("n0", range(16))
        await site.pass_time(0.1)
        await site.in_window(OVER_CORE)
        pair, core = one(site), site.switches[OcsId("core0")]
        read = core.wire.read_circuits
        (failed, *_) = site.reader.device_pairs(pair)

        async def shown() -> Sequence[DeviceCircuit]:
            return [
                DeviceCircuit(each.cross_connect, CircuitState.FAILED) if each.cross_connect == failed else each
                for each in await read()
            ]

        core.wire.read_circuits = shown  # type: ignore[method-assign]
        site_reading = await site.coordinator.scan()
        assert {(OcsId("core0"), port) for port in pair.ports} <= site_reading.failures.ports


class EventSwitch(VirtualSwitch):
    """Sends a list of events; raises entries that are exceptions."""

    script: Sequence[SwitchEvent | Exception] = ()

    async def watch(self) -> AsyncGenerator[SwitchEvent, None]:
        for entry in self.script:
            if isinstance(entry, Exception):
                raise entry
            yield entry
        await asyncio.Event().wait()


async def test_defect_of_one_driver_does_not_stop_events_of_others(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock(1000.0)
    broken, sound = EventSwitch("broken", clock=clock), EventSwitch("sound", clock=clock)
    broken.script = [KeyError("port")]
    received: list[str] = []
    listening = asyncio.create_task(SwitchEvents({"broken": broken, "sound": sound}, clock, received.append).run())
    await clock.advance(0.1)
    assert received == []
    broken.script = [SwitchEvent(1.0, EventKind.PORT, "port 3 failed", port=3)]
    await clock.advance(LONGEST_PAUSE_S)
    assert received == ["broken", "broken"]  # events may have been lost while the stream was down
    assert "switch broken reports: port: port 3 failed" in caplog.text
    assert caplog.text.count("its events are not received: KeyError") == 1
    listening.cancel()
