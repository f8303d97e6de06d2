"""Tests of circuits of weight syncs, with virtual switches and the real coordinator: the possible network, the circuits
of a sync, their restoration, and the reported network after any failure."""

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from fabric_harness import ACROSS_RAILS, GEN, Harness, harness

from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from orchestrrl.core.config.weights import NetworkSettings
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.daemon.weight_circuits import JOB, PERIOD, CircuitsForSyncs, PacketNetwork, intent_of
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.weights.controller.actions import BroughtUp
from orchestrrl.weights.controller.planning import PlannedSync
from orchestrrl.weights.controller.reports import SyncPhase
from orchestrrl.weights.model import (
    Peer,
    PeerLocation,
    PeerRole,
)
from orchestrrl.weights.orders import CarryEdge
from planner.fabric.intent import Stage
from planner.model import Mode, PeerId
from planner.sync_tree.network import PairLink

T = TypeVar("T")
MIB = 1 << 20


def peer(name: str, place: PeerLocation) -> Peer:
    role = PeerRole.TRAINER if name.startswith("t") else PeerRole.ENGINE
    return Peer(PeerId(name), role, name, place, {"tcp": f"{name}:1"})


# Two training hosts in one PoD; two in each generating PoD.
PEERS = {
    each.id: each
    for each in (
        peer("t0", PeerLocation(gpu=0)),
        peer("t1", PeerLocation(gpu=2)),
        peer("g0", PeerLocation(gpu=16)),
        peer("g1", PeerLocation(gpu=19)),
        peer("h0", PeerLocation(gpu=24)),
        peer("h1", PeerLocation(gpu=27)),
    )
}


def planned(*edges: tuple[str, str], size: int = 4096 * MIB) -> PlannedSync:
    made = tuple(
        CarryEdge("all", 0, size, PeerId(src), PeerId(dst), id=f"e{number}", transport="tcp", address=f"{dst}:1")
        for number, (src, dst) in enumerate(edges)
    )
    # The rest of a plan is not used.
    return cast(PlannedSync, SimpleNamespace(edges=made))


# A tree: into each generating PoD once, and from ToR to ToR there.
TREE = planned(("t0", "g0"), ("g0", "g1"), ("t1", "h0"), ("h0", "h1"))


async def within(site: Harness, work: Coroutine[Any, Any, T], limit_s: float = 60.0) -> T:
    """Advance the virtual clock until the call is done."""
    task = asyncio.ensure_future(work)
    until_s = site.clock.now_s() + limit_s
    while not task.done() and site.clock.now_s() < until_s:
        await site.pass_time(0.01)
    assert task.done(), site.coordinator.reports(4)
    return task.result()


async def brought(
    site: Harness, circuits: CircuitsForSyncs, sync: PlannedSync = TREE
) -> tuple[BroughtUp, list[SyncPhase]]:
    phases: list[SyncPhase] = []
    return await within(site, circuits.bring_up("s1", sync, phases.append)), phases


def of(site: Harness, **more: Any) -> CircuitsForSyncs:
    return CircuitsForSyncs(site.coordinator, lambda: PEERS, **more)


async def test_possible_network_consists_of_healthy_and_free_links(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        await site.pass_time(0.1)
        network = of(site).network()
        assert network.stations[PeerId("g1")].pod == "gen0"
        assert network.stations[PeerId("g1")].tor == "gen0/r1"
        assert (network.link_gbps, network.stations[PeerId("t0")].nic_gbps) == (200, 200)
        # Four lanes each, one of which is reserved for responses.
        assert network.boundary_circuits == dict.fromkeys(("train0", "train1", "gen0", "gen1"), 3)
        assert network.tor_circuits["gen0/r0"] == 4
        # The core connects training with generating PoDs.
        assert network.pairs is not None
        assert network.pairs.keys() == {(gen, train) for gen in ("gen0", "gen1") for train in ("train0", "train1")}
        assert network.pairs["gen0", "train0"] == PairLink(3, 200)
        site.overrides.mask(["port core0:9", "port gen0/agg0:1"], "dirty")
        network = of(site).network()
        assert network.boundary_circuits["gen0"] == 2
        assert network.tor_circuits["gen0/r0"] == 3


async def test_circuits_of_the_plan_come_up_and_previous_ones_are_restored(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        await site.at_boundary(GEN)
        before = site.up()
        circuits = of(site)
        got, phases = await brought(site, circuits)
        assert phases == [SyncPhase.WINDOW, SyncPhase.CIRCUITS]
        assert not [note for note in got.notes if "joins" in note or "not up" in note]
        assert got.network.pairs is not None
        assert got.network.pairs.keys() == {("gen0", "train0"), ("gen1", "train0")}
        assert all(pair.circuits >= 1 and pair.gbps == 200 for pair in got.network.pairs.values())
        assert got.network.boundary_circuits["train0"] == sum(pair.circuits for pair in got.network.pairs.values())
        # Each edge of the tree has a circuit between its own ToRs.
        assert got.network.tor_circuits["gen0/r0"] >= 2
        assert ("gen0/r0", "gen0/r1") in site.pairs()
        assert site.coordinator.sync_is_up
        words = await within(site, circuits.tear_down("s1"))
        assert words == ("generation: committed (committed)",)
        assert site.up() >= before
        assert not site.coordinator.sync_is_up
        assert await within(site, circuits.tear_down("s1")) == ()  # twice is harmless


async def test_training_circuits_are_restored_in_a_pause(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        agent = site.agent("n0", range(16))
        assert (await site.in_window(ACROSS_RAILS)).state is PeriodState.COMMITTED
        before = site.up()
        circuits = of(site)

        async def quiet(work: Awaitable[T]) -> T:
            task = asyncio.ensure_future(work)
            while not task.done():
                agent.quiet(60.0)
                await site.pass_time(0.5)
            return task.result()

        # The trainer is another job: while it sends, its pause is waited for.
        agent.busy()
        phases: list[SyncPhase] = []
        waiting = asyncio.ensure_future(circuits.bring_up("s1", TREE, phases.append))
        await site.pass_time(1.0)
        assert (site.up(), phases) == (before, [SyncPhase.WINDOW])
        await quiet(waiting)
        assert phases == [SyncPhase.WINDOW, SyncPhase.CIRCUITS]
        assert site.up() != before
        agent.busy()
        (words,) = await within(site, circuits.tear_down("s1"))
        assert words == "experts: circuits are restored in a pause of training"
        await site.pass_time(40.0)
        (report, *_) = site.coordinator.reports(1)
        assert (report.period, report.state) == ("experts", PeriodState.WAITING)
        await quiet(site.coordinator.until_over(site.coordinator.active[0]))
        assert site.up() >= {each for each in before if each.switch == "train0/agg0"}


async def test_trainer_that_stands_still_is_not_waited_for(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        agent = site.agent("t0", range(16), "rl")
        site.coordinator.announce(
            "experts", '{"stage": "train", "job": "rl", "traffic": [{"operation": "EP", "primitive": "all_to_all", '
            '"groups": [[0, 3], [4, 7]], "bytes_per_rank": 4e9}]}', 0.1
        )  # fmt: skip
        await site.pass_time(0.5)
        agent.busy("rl")
        phases: list[SyncPhase] = []
        got = await within(site, of(site).bring_up("s1", TREE, phases.append, still=True))
        assert phases == [SyncPhase.WINDOW, SyncPhase.CIRCUITS]
        assert got.network.pairs


@pytest.mark.parametrize("why", ["operator_paused", "advise", "pinned"])
async def test_sync_gets_the_present_network_if_nothing_may_change(tmp_path: Path, why: str) -> None:
    async with harness(tmp_path) as site:
        await site.at_boundary(GEN)
        before = site.up()
        match why:
            case "operator_paused":
                site.pause_registry.pause(PauseScope.SYNC, "not today", 0.0)
            case "advise":
                site.mode = Mode.ADVISE
            case _:
                site.overrides.pin([], "not today", 0.0)
        circuits = of(site)
        got, phases = await brought(site, circuits)
        assert phases == [SyncPhase.WINDOW]
        assert got.notes[0].startswith(f"circuits of the sync are not up, kept ({why}")
        assert "no link joins gen0 and train0" in got.notes
        assert got.network.pairs == {}
        assert got.network.tor_circuits["gen0/r0"] == 3  # as for generation, next to one that is reserved for responses
        assert got.network.boundary_circuits["gen0"] == 0
        assert await within(site, circuits.tear_down("s1")) == ()
        assert site.up() == before


async def test_pins_and_masks_are_respected(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        await site.pass_time(0.1)
        site.overrides.pin(["core0:1-13"], "kept", 0.0)  # train0 to gen1
        site.overrides.mask(["port core0:9", "port core0:10", "port core0:11"], "dirty")  # all free ones of gen0
        assert of(site).network().boundary_circuits["gen0"] == 0
        got, _ = await brought(site, of(site))
        assert "no link joins gen0 and train0" in got.notes
        assert got.network.pairs is not None
        assert ("gen1", "train0") in got.network.pairs
        assert all(port not in (9, 10, 11) for each in site.up() if each.switch == "core0" for port in each.ports)


async def test_packet_side_joins_pods_without_circuits(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        site.mode = Mode.ADVISE
        tors = [tor.id for tor in site.site.tors if tor.pod != "gen1"]
        circuits = of(site, packet_tors=tors, packet_gbps=10.0)
        got, _ = await brought(site, circuits)
        assert got.network.pairs == dict.fromkeys(
            (("gen0", "train0"), ("gen0", "train1"), ("train0", "train1")), PairLink(1, 10.0)
        )
        assert "gen0 and train0 are joined only by the packet side, at 10 Gbps" in got.notes
        assert "no link joins gen1 and train0" in got.notes
        assert got.network.tor_circuits["gen0/r0"] == 1
        assert got.network.tor_circuits["gen1/r0"] == 0


async def test_pod_with_failed_fibres_is_reported_and_others_get_circuits(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        await site.at_boundary(GEN)
        # All fibres of gen0's uplink have failed, which is not detected yet.
        for port in (9, 10, 11, 12):
            site.fail("core0", DeviceFault(DeviceFaultKind.FAIL_PORT, port))
        circuits = of(site)
        got, _ = await brought(site, circuits)
        assert got.network.pairs is not None
        assert "no link joins gen0 and train0" in got.notes
        assert ("gen1", "train0") in got.network.pairs
        words = await within(site, circuits.tear_down("s1"), 120.0)
        assert words == ("generation: committed (committed)",)
        assert ("gen0/r0", "gen0/r1") in site.pairs()


async def test_abandoned_sync_changes_nothing_more(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        agent = site.agent("n0", range(16))
        await site.in_window(ACROSS_RAILS)
        agent.busy()
        before = site.up()
        bringing = asyncio.ensure_future(of(site).bring_up("s1", TREE, lambda _: None))
        await site.pass_time(0.5)
        bringing.cancel()
        await site.pass_time(0.5)
        (report, *_) = site.coordinator.reports(1)
        assert (report.period, report.state, report.code) == (PERIOD, PeriodState.KEPT, "withdrawn")
        assert site.up() == before


async def test_restarted_daemon_restores_circuits(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        await site.at_boundary(GEN)
        before = site.up()
        await brought(site, of(site))
        await site.kill()
        site.start()
        await site.pass_time(0.1)
        (words,) = await within(site, of(site).tear_down("s1"))
        assert words.startswith("generation: committed")
        assert site.up() >= before
        await site.kill()
        site.start()
        await site.pass_time(0.1)
        assert not site.coordinator.sync_is_up
        assert await within(site, of(site).tear_down("s1")) == ()


async def test_too_few_circuits_for_a_wave_are_reported(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        await site.pass_time(0.1)
        site.overrides.mask(["port core0:10", "port core0:11"], "dirty")  # one lane is left for gen0
        two = planned(("t0", "g0"), ("t1", "g1"))
        edges = tuple(replace(edge, rate_gbps=200.0) for edge in two.edges)
        got, _ = await brought(site, of(site), cast(PlannedSync, SimpleNamespace(edges=edges)))
        assert got.notes == ("gen0 and train0 have circuits for 200 Gbps, the plan uses 400",)
        one_by_one = tuple(replace(edge, wave=number) for number, edge in enumerate(edges))
        got, _ = await brought(site, of(site), cast(PlannedSync, SimpleNamespace(edges=one_by_one)))
        assert got.notes == ()


def test_intent_is_the_traffic_of_edges_between_gpus() -> None:
    from fabric_harness import SITE

    from orchestrrl.fabric.site import read_site

    peers = {
        **PEERS,
        PeerId("n0"): peer("n0", PeerLocation(pod="gen1", tor="gen1/r1")),
        PeerId("n1"): peer("n1", PeerLocation(pod="elsewhere")),
    }
    sync = planned(("t0", "g0"), ("t0", "g0"), ("t0", "n0"), ("t0", "n1"), size=5)
    intent, notes = intent_of(sync.edges, read_site(SITE), peers)
    assert (intent.stage, intent.job) == (Stage.WEIGHT_SYNC, JOB)
    assert [(each.groups, each.bytes_per_rank) for each in intent.traffic] == [(((0, 25),), 5), (((0, 16),), 10)]
    assert notes == ("no circuits for n1: their place in the site is unknown",)


async def test_network_without_a_fabric_is_the_configured_one() -> None:
    settings = NetworkSettings.model_validate(
        {"link_gbps": 10.0, "pods": [{"id": "a", "boundary_circuits": 2}], "tors": [{"id": "a/r0", "circuits": 4}]}
    )
    peers = {
        PeerId("t0"): peer("t0", PeerLocation(pod="a", tor="a/r0")),
        PeerId("g0"): peer("g0", PeerLocation(nic_gbps=25.0)),
    }
    network = PacketNetwork(settings, lambda: peers)
    got = await network.bring_up("s1", TREE, lambda _: None)
    assert got == BroughtUp(network.network())
    assert got.network.boundary_circuits == {"a": 2}
    assert [each.nic_gbps for each in got.network.stations.values()] == [100.0, 25.0]
    assert await network.tear_down("s1") == ()
