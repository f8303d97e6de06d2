"""The fabric is verified against its site in virtual time: reports of `verify`, light of `walk`, and what stays
untouched."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabric_harness import Harness
from routed_harness import RoutedHarness

from ocs_drivers.errors import DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import ChangeMode, CircuitChange, Connectivity, CrossConnect
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.fabric.circuit_change import CircuitOutcome
from orchestrrl.fabric.route_drivers import virtual
from orchestrrl.fabric.site import parse_site
from orchestrrl.fabric.switch_reader import SwitchReader
from orchestrrl.fabric.verification import LIGHT_WITHIN_S, FabricVerifier, VerificationReport
from orchestrrl.lab.box.run import SITE
from planner.fabric.cables import DARK, STRANGER, STRAY, WRONG_CABLE
from planner.fabric.model import EndpointId, OcsId, PortPair

# Ports 1-4 and 5-8 of each PoD's switch belong to its two ToRs, 9-12 are its lanes. The core has the lanes of `train0`
# on 1-4 and those of `gen0` on 5-8.
TRAIN, GEN, CORE = OcsId("train0/agg0"), OcsId("gen0/agg0"), OcsId("core0")
R0, R1 = EndpointId("train0/r0"), EndpointId("train0/r1")
INSIDE = PortPair(TRAIN, 1, 5)
OVER_CORE = (PortPair(TRAIN, 2, 9), PortPair(CORE, 1, 5), PortPair(GEN, 1, 9))
FIBRES = 32
IN_USE = 8  # over those


class VerifiedHarness(RoutedHarness):
    """A site with the link `INSIDE` a PoD and one `OVER_CORE`."""

    async def begin(self) -> None:
        rerouting = self.follower.rerouting
        self.late_signals = rerouting.signals
        rerouting.signals = self.signals  # type: ignore[method-assign]
        await self.connect(INSIDE, *OVER_CORE)
        await self.during(self.follower.reroute(self.light.up()))

    async def signals(self) -> Any:
        """Return signals of ToRs that detect changes of light at once."""
        self.light.shine()
        return await self.late_signals()

    async def connect(self, *pairs: PortPair) -> None:
        for pair in pairs:
            change = await self.reader.change_of(pair.switch, [], [pair])
            assert (await self.during(self.circuits.change(pair.switch, change, ChangeMode.SAFE))).done

    async def verify(self, walk: bool = False) -> VerificationReport:
        if walk:
            self.pause_registry.pause(PauseScope.FABRIC, "cables are checked")
        return await self.during(verifier(self, self.follower).verify(walk))

    def lit_on(self, switch: OcsId, since: int = len(OVER_CORE) + 1) -> list[PortPair]:
        """Return the cross-connects commanded on the switch, in order, without the first `since` changes."""
        entries = self.journal.tail(1000, (EntryKind.CIRCUITS_INTENT,))[since:]
        return [
            PortPair(switch, *map(int, each.split(":")))
            for entry in entries
            if entry.body["switch"] == switch
            for each in entry.body["add"]
        ]


def verifier(harness: Harness, routing: object) -> FabricVerifier:
    glass = SwitchReader(harness.site, harness.switches, harness.clock, harness.circuits.owners)
    return FabricVerifier(harness.coordinator, routing, harness.circuits, glass, harness.pause_registry, harness.clock)  # type: ignore[arg-type]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[VerifiedHarness]:
    made = VerifiedHarness(tmp_path, parse_site(SITE))
    made.start()
    await made.begin()
    yield made
    await made.stop()


async def cut_off(harness: Harness, switch: OcsId) -> None:
    """Make the router unreachable."""

    async def open() -> None:
        raise DriverRetryable("no route to host")

    harness.switches[switch]._wire.open = open  # type: ignore[method-assign]
    await harness.switches[switch].close()


def faults(found: VerificationReport) -> list[tuple[str, str]]:
    return [(fault.kind, fault.where) for fault in found.faults]


async def test_verify_of_sound_site_changes_nothing(harness: VerifiedHarness) -> None:
    sent = len(harness.sent)
    found = await harness.verify()
    others = "core0:2, core0:3, core0:4, core0:6, core0:7, core0:8, and 18 more"
    why = f"no light shows where they end; --walk lights free ones: {others}"
    assert found == VerificationReport((), 4, 2, IN_USE, FIBRES, (why,))
    assert len(harness.sent) == sent


async def test_walk_lights_every_free_fibre_and_restores_state(harness: VerifiedHarness) -> None:
    up, owned, began_s = harness.up(), harness.circuits.owners.owned(TRAIN), harness.clock.now_s()
    routed, sends = harness.routed, [router.wire.sends for router in harness.light.routers.values()]
    assert await harness.verify(walk=True) == VerificationReport((), 4, 2, FIBRES, FIBRES)
    lit = {switch: harness.lit_on(switch) for switch in harness.switches}
    assert {port for pair in lit[TRAIN] for port in pair.ports} == {*range(1, 13)} - {1, 2, 5, 9}
    assert {port for pair in lit[CORE] for port in pair.ports} == {*range(1, 9)} - {1, 5}
    assert (
        harness.clock.now_s() - began_s < LIGHT_WITHIN_S * sum(map(len, lit.values())) / 4
    )  # none lasts longer than needed
    assert (harness.up(), harness.circuits.owners.owned(TRAIN)) == (up, owned)
    # Packets kept their routes, and maintenance continues afterwards.
    assert (harness.routed, harness.light.dark) == (routed, [])
    assert [router.wire.sends for router in harness.light.routers.values()] == sends
    harness.light.cut.add(min(routed))
    await harness.pass_time(3.0)
    assert harness.routed == routed - {min(routed)}


async def test_used_cable_swapped_with_free_one_is_found(harness: VerifiedHarness) -> None:
    harness.light.swap((TRAIN, 1), (TRAIN, 4))
    looked = await harness.verify()
    assert faults(looked) == [(WRONG_CABLE, "train0/agg0:1")]
    assert looked.fibres == IN_USE - len(INSIDE.ports)
    walked = await harness.verify(walk=True)
    assert faults(walked) == [(WRONG_CABLE, "train0/agg0:1"), (WRONG_CABLE, "train0/agg0:4")]
    assert (walked.fibres, walked.not_seen) == (FIBRES - 3, ("in use or broken: train0/agg0:5",))


async def test_unexpected_router_is_named(harness: VerifiedHarness) -> None:
    await harness.connect(PortPair(GEN, 2, 5))
    harness.light.swap((TRAIN, 5), (GEN, 5))
    found = await harness.verify()
    assert {fault.where: fault.what for fault in found.faults if fault.kind == STRANGER} == {
        "train0/agg0:1": "train0/r1 should answer at train0/r0/swp1: gen0/r1 answers there",
        "train0/agg0:5": "train0/r0 should answer at train0/r1/swp1: gen0/r0 answers there",
        "gen0/agg0:2": "gen0/r1 should answer at gen0/r0/swp2: train0/r1 answers there",
        "gen0/agg0:5": "gen0/r0 should answer at gen0/r1/swp1: train0/r0 answers there",
    }


async def test_missing_light_is_awaited_and_reported(harness: VerifiedHarness) -> None:
    harness.light.broken = {(TRAIN, 3), (CORE, 2)}
    began_s = harness.clock.now_s()
    found = await harness.verify(walk=True)
    fibre, lane = found.faults
    assert (fibre.kind, fibre.where) == (DARK, "train0/agg0:3")
    assert fibre.what.endswith("does not reach train0/r0/swp3: it arrives nowhere")
    assert (lane.kind, lane.where) == (DARK, "gen0/agg0:10")
    assert lane.what.startswith("no light gets from it over core0:6 and core0:2 to train0/agg0:10: ")
    assert found.not_seen == ("in use or broken: core0:2, core0:6, train0/agg0:10",)
    assert found.fibres == FIBRES - 5
    elapsed_s = harness.clock.now_s() - began_s
    assert 3 * LIGHT_WITHIN_S <= elapsed_s < 3 * LIGHT_WITHIN_S + 4.0  # the fibre is lit with two others
    assert harness.up() == {INSIDE, *OVER_CORE}


async def test_walk_skips_failed_and_masked_ports(harness: VerifiedHarness) -> None:
    masked = ["core0:2", "gen0/agg0:3", "gen0/agg0:4", "gen0/agg0:7", "train0/agg0:3"]
    harness.overrides.mask([f"port {port}" for port in masked], "suspects")
    harness.fail(GEN, DeviceFault(DeviceFaultKind.FAIL_PORT, 6))
    found = await harness.verify(walk=True)
    assert faults(found) == [("failed_port", "gen0/agg0:6")]
    # The lane behind port 2 is not lit; the unpaired lane of the other PoD shares one that was lit before.
    assert found.not_seen == (f"in use or broken: {', '.join(masked)}, train0/agg0:10",)
    assert found.fibres == FIBRES - 7
    assert harness.lit_on(CORE) == [PortPair(CORE, 3, 6), PortPair(CORE, 4, 7), PortPair(CORE, 3, 8)]
    assert not {3, 10} & {port for pair in harness.lit_on(TRAIN) for port in pair.ports}
    assert not {3, 4, 6, 7} & {port for pair in harness.lit_on(GEN) for port in pair.ports}


@pytest.mark.parametrize("masked", [True, False])
async def test_walk_skips_masked_and_silent_switches(harness: VerifiedHarness, masked: bool) -> None:
    if masked:
        harness.overrides.mask(["switch gen0/agg0"], "suspect")
    else:
        await cut_off(harness, GEN)
    found = await harness.verify(walk=True)
    assert ("silent_switch" in {fault.kind for fault in found.faults}) is not masked
    # All ToR fibres of `train0`, whose lanes have no partner, and the fibres of links that are up.
    assert harness.lit_on(GEN) == harness.lit_on(CORE) == []
    assert found.fibres == (8 + 5 if masked else 7)


async def test_lane_without_verified_fibre_is_unproven(harness: VerifiedHarness) -> None:
    harness.overrides.mask([f"port gen0/agg0:{port}" for port in range(2, 9)], "no transceivers there")
    found = await harness.verify(walk=True)
    whys = [f"gen0/agg0:{port}: no verified ToR fibre on its switch is free" for port in (10, 11, 12)]
    assert list(found.not_seen[:-1]) == whys
    assert harness.lit_on(CORE) == []


async def test_unexpected_light_is_reported_with_answering_router(harness: VerifiedHarness) -> None:
    one, other = harness.light.routers[R0].device, harness.light.routers[R1].device
    one.join("swp3", other, "swp4")
    harness.light.routers[EndpointId("gen0/r0")].device.set_signal("swp2", True)
    found = await harness.verify()
    why = "has a signal, but no cross-connect sends it one"
    assert [(fault.kind, fault.where, fault.what) for fault in found.faults] == [
        (STRAY, "gen0/r0/swp2", why),
        (STRAY, "train0/r0/swp3", f"{why}: train0/r1 answers there"),
        (STRAY, "train0/r1/swp4", f"{why}: train0/r0 answers there"),
    ]


async def test_silent_router_is_reported(harness: VerifiedHarness) -> None:
    harness.light.routers[R1].device.inject(virtual.RouterFault(virtual.RouterFaultKind.UNREACHABLE))
    found = await harness.verify()
    assert found.not_seen[0].startswith("train0/r1 does not answer: ")
    assert found.fibres == IN_USE - len(INSIDE.ports)


@pytest.mark.parametrize("silent", [R1, GEN])
async def test_unknowable_light_is_not_reported(harness: VerifiedHarness, silent: str) -> None:
    """A router that does not answer is not dark; circuits of a silent switch may send light anywhere."""
    if silent == GEN:
        await cut_off(harness, GEN)
    else:
        harness.light.routers[R1].device.inject(virtual.RouterFault(virtual.RouterFaultKind.UNREACHABLE))
    assert faults(await harness.verify()) == ([("silent_switch", GEN)] if silent == GEN else [])


async def test_walk_waits_for_slow_loss_of_signal(harness: VerifiedHarness) -> None:
    harness.follower.rerouting.signals = harness.late_signals  # type: ignore[method-assign]
    harness.overrides.mask(["switch gen0/agg0", "port train0/agg0:7", "port train0/agg0:8"], "not of interest")
    assert (await harness.verify(walk=True)).faults == ()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(DeviceFault(DeviceFaultKind.STICK_MIRROR, 10), id="rolled back"),
        pytest.param(DeviceFault(DeviceFaultKind.DROP_CONNECTION), id="out of reach"),
    ],
)
async def test_failed_walk_darkens_lit_circuits(harness: VerifiedHarness, fault: DeviceFault) -> None:
    """It fails at the switch at the end of a lane's path, after the other two were lit."""
    really = harness.circuits.change

    async def change(switch: str, change: CircuitChange, mode: ChangeMode) -> CircuitOutcome:
        if change.connect == (CrossConnect(3, 10),) and switch == TRAIN:
            harness.fail(TRAIN, fault)
            if fault.kind is DeviceFaultKind.DROP_CONNECTION:
                await cut_off(harness, TRAIN)
        return await really(switch, change, mode)

    harness.circuits.change = change  # type: ignore[assignment, method-assign]
    with pytest.raises(Permanent, match=r"^cross-connect train0/agg0:3-10 could not be "):
        await harness.verify(walk=True)
    assert {pair for pair in harness.up() if pair.switch != TRAIN} == set(OVER_CORE[1:])


async def test_walk_is_refused_without_pause_or_routers(harness: VerifiedHarness) -> None:
    sent = len(harness.sent)
    with pytest.raises(Permanent, match="run `orchestrrl fabric pause` first"):
        await harness.during(verifier(harness, harness.follower).verify(walk=True))
    harness.pause_registry.pause(PauseScope.FABRIC, "cables are checked")
    with pytest.raises(Permanent, match=r"list the ToRs in fabric\.routers"):
        await harness.during(verifier(harness, None).verify(walk=True))
    assert len(harness.sent) == sent
    assert (await harness.during(verifier(harness, None).verify(walk=False))).faults == ()


async def test_switch_readings_are_compared_with_owned_circuits(tmp_path: Path) -> None:
    site = Harness(tmp_path, parse_site(SITE), connectivity=Connectivity.INGRESS_EGRESS)
    site.start()
    for pair in (INSIDE, *OVER_CORE):
        change = await site.reader.change_of(pair.switch, [], [pair])
        await site.during(site.circuits.change(pair.switch, change, ChangeMode.SAFE))
    train, core = site.switches[TRAIN].model, site.switches[CORE].model
    train.remove([CrossConnect(1, 37), CrossConnect(5, 33)])  # owned
    train.add([CrossConnect(6, 35), CrossConnect(3, 38)])  # not owned
    train.add([CrossConnect(7, 36)])  # one direction only
    core.add([CrossConnect(2, 35), CrossConnect(3, 34)])  # of one PoD
    core.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 8))
    await cut_off(site, GEN)
    found = await site.during(verifier(site, None).verify(walk=False))
    assert [(fault.kind, fault.where) for fault in found.faults] == [
        ("silent_switch", "gen0/agg0"),
        ("missing_circuit", "train0/agg0:1-5"),
        ("unknown_circuit", "train0/agg0:3-6"),
        ("odd_circuit", "core0:2-3"),
        ("one_way", "train0/agg0:7:36"),
        ("failed_port", "core0:8"),
    ]
    no_tors = "fabric.routers lists no ToRs, so it is unknown where light arrives"
    assert replace(found, faults=()) == VerificationReport((), 3, 0, 0, 16, (no_tors,))
    await site.stop()
