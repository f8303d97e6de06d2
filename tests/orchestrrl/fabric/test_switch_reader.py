"""Conversion between cross-connects of the site and of the devices."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fabric_harness import OVER_CORE, Harness, harness
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import BootBehaviour, Connectivity, CrossConnect, CrossConnectReading, SwitchFacts
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.fabric.switch_reader import ANSWER_WITHIN_S, SiteReading, device_pairs, site_pairs
from planner.fabric.model import OcsId, PortPair, port_pair

SWITCH = OcsId("agg0")


def facts(connectivity: Connectivity, egress_from: int) -> SwitchFacts:
    sides = (
        range(1, 17),
        range(1, 17) if connectivity is Connectivity.ANY_TO_ANY else range(egress_from, 16 + egress_from),
    )
    return SwitchFacts("v", "m", "s", "1", connectivity, *sides, 0.025, BootBehaviour.DARK)


# Polatis numbers the egress side after the ingress side; Calient numbers both alike.
DEVICES = [
    facts(Connectivity.ANY_TO_ANY, 1),
    facts(Connectivity.INGRESS_EGRESS, 17),
    facts(Connectivity.INGRESS_EGRESS, 1),
]


@st.composite
def matchings(draw: st.DrawFn) -> frozenset[PortPair]:
    ports = draw(st.permutations(range(1, 17)))
    count = draw(st.integers(0, 8))
    return frozenset(port_pair(SWITCH, ports[2 * i], ports[2 * i + 1]) for i in range(count))


@pytest.mark.parametrize("device", DEVICES, ids=["any to any", "interleaved sides", "sides alike"])
@given(wanted=matchings(), data=st.data())
def test_cross_connects_convert_both_ways(
    device: SwitchFacts, wanted: frozenset[PortPair], data: st.DataObject
) -> None:
    present = {pair for each in wanted for pair in device_pairs(device, each)}
    assert len(present) == len(wanted) * (1 if device.connectivity is Connectivity.ANY_TO_ANY else 2)
    assert site_pairs(SWITCH, device, present) == (set(wanted), set())
    if present and device.connectivity is Connectivity.INGRESS_EGRESS:
        lost = data.draw(st.sampled_from(sorted(present)))
        found, odd = site_pairs(SWITCH, device, present - {lost})
        assert len(found) == len(wanted) - 1
        assert len(odd) == 1


async def test_one_way_circuit_blocks_its_ports(tmp_path: Path) -> None:
    async with harness(tmp_path, connectivity=Connectivity.INGRESS_EGRESS) as site:
        core = OcsId("core0")
        site.switches[core].model.add([CrossConnect(1, 37)])  # from the site's port 1 to its port 5
        site_reading = await _looked(site)
        assert site_reading.odd == {core: {CrossConnect(1, 37)}}
        assert {(core, 1), (core, 5)} <= site_reading.failures.ports
        assert site_reading.cross_connects == frozenset()
        site.agent("n0", range(16))
        await site.pass_time(0.1)
        assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
        present = {circuit.cross_connect for circuit in site.switches[core].model.circuits()}
        assert {pair for pair in present if pair.ingress_port in (1, 5)} == {CrossConnect(1, 37)}


async def test_failed_port_of_either_side_blocks_both_directions(tmp_path: Path) -> None:
    async with harness(tmp_path, connectivity=Connectivity.INGRESS_EGRESS) as site:
        site.fail("core0", DeviceFault(DeviceFaultKind.FAIL_PORT, 32 + 3))
        site.fail("core0", DeviceFault(DeviceFaultKind.DISABLE_PORT, 7))
        assert (await _looked(site)).failures.ports == {("core0", 3), ("core0", 7)}


async def test_overlapping_scans_end_when_silent_switch_answers(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        core, agg = OcsId("core0"), OcsId("train0/agg0")
        answers = {switch: asyncio.Event() for switch in (core, agg)}

        def late(switch: OcsId) -> Callable[[], Awaitable[CrossConnectReading]]:
            really = site.switches[switch].cross_connects

            async def read() -> CrossConnectReading:
                await answers[switch].wait()
                return await really()

            return read

        for switch in answers:
            site.switches[switch].cross_connects = late(switch)  # type: ignore[method-assign,assignment]
        answers[agg].set()
        first = asyncio.ensure_future(site.reader.scan())
        await site.pass_time(ANSWER_WITHIN_S + 0.1)
        assert set((await first).unread) == {core}
        answers[agg].clear()
        second = asyncio.ensure_future(site.reader.scan())  # does not query the silent switch again
        await site.pass_time(0.01)
        answers[core].set()
        await site.pass_time(0.01)
        third = asyncio.ensure_future(site.reader.scan())
        await site.pass_time(0.01)
        answers[agg].set()
        await site.pass_time(0.01)
        assert set((await second).unread) == {core}
        assert not (await third).unread


async def _looked(site: Harness) -> SiteReading:
    await site.pass_time(0.01)
    return await site.coordinator.scan()
