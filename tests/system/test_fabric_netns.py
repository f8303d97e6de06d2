"""Circuits and packets together on a real kernel: the coordinator as wired by the daemon, `iproute` on ToRs that are
namespaces, and switches whose mirrors are bridges. A packet network joins all ToRs, so no packet has to be lost."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from namespaces import Lab, Ocs, Stream, laboratory, sent_packets

from ocs_drivers.model import Action, CrossConnect
from ocs_drivers.virtual import VirtualSwitch, VirtualSwitchWire
from orchestrrl.core.clock import WallClock
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.wiring import DaemonEdges, build_daemon
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.periods import PeriodReport, PeriodState
from orchestrrl.fabric.window_tracker import WindowTracker
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation

PODS = ("train0", "gen0")
TORS = tuple(f"{pod}/r{i}" for pod in PODS for i in (0, 1))
SWP = ("swp1", "swp2", "swp3")


def agg_ports(pod: str) -> dict[str, str]:
    return {f"{pod}/r0": "1-3", f"{pod}/r1": "4-6", f"{pod}/up0": "7-8"}


SITE = {
    "link_gbps": 100,
    "nic_gbps": 100,
    "pods": [{"id": "train0", "role": "train"}, {"id": "gen0", "role": "gen"}],
    "tors": [{"id": tor, "pod": tor[:-3]} for tor in TORS],
    "uplinks": [{"id": f"{pod}/up0", "pod": pod} for pod in PODS],
    "servers": [{"id": f"s{gpu}", "pod": tor[:-3], "gpus": str(gpu), "tors": [tor]} for gpu, tor in enumerate(TORS)],
    "switches": [
        *(
            {"id": f"{pod}/agg0", "tier": "agg", "pod": pod, "device": "piezo_polatis", "ports": agg_ports(pod)}
            for pod in PODS
        ),
        {"id": "core0", "tier": "core", "device": "piezo_polatis", "ports": {"train0/up0": "1-2", "gen0/up0": "3-4"}},
    ],
}
# Weights from the trainer's first GPU to both engines, then traffic between the engines only.
SYNC = Intent(
    "sync",
    Stage.WEIGHT_SYNC,
    (Traffic(TrafficOperation.WEIGHT_SYNC, Primitive.BROADCAST, ((0,),), 8e9, receivers=((2, 3),)),),
)
GEN = Intent("gen", Stage.GEN, (Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, ((2, 3),), 4e9),))


class BridgeWire(VirtualSwitchWire):
    """A session with a virtual switch whose mirrors move bridges without blocking the event loop."""

    bridges: Ocs

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        await super().set(action, pairs)
        move = self.bridges.connect if action is Action.ADD else self.bridges.disconnect
        for pair in pairs:
            await asyncio.to_thread(move, pair.ingress_port, pair.egress_port)


class Plant:
    """The site in namespaces, and the part of a daemon that controls it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.clock = WallClock()
        self.tors = {tor: lab.add(f"t{n}", f"192.0.2.{n}/32", f"10.0.{n}.1/32") for n, tor in enumerate(TORS, start=1)}
        core, *aggs = (Ocs(lab, name) for name in ("core0", *PODS))
        ports = {f"{pod}/agg0": agg for pod, agg in zip(PODS, aggs, strict=True)} | {"core0": core}
        for pod, agg in zip(PODS, aggs, strict=True):
            for r in (0, 1):
                for k, interface in enumerate(SWP, start=1):
                    agg.fibre(3 * r + k, self.tors[f"{pod}/r{r}"], interface)
            for lane in (1, 2):
                agg.lane(6 + lane, core, 2 * PODS.index(pod) + lane)
        self._packet_network()
        self.switches = {id: self._switch(id, bridges) for id, bridges in ports.items()}
        (folder / "site.yaml").write_text(yaml.safe_dump(SITE))
        self.config = parse_config(yaml.safe_dump(self._document()), folder)
        self.folder = folder
        self.coordinator: CircuitCoordinator
        self.routing: FabricRouting

    def _document(self) -> dict[str, Any]:
        routers = [
            {
                "tor": tor,
                "driver": "iproute",
                "options": {"prefix": ["ip", "netns", "exec", namespace], "command_timeout_s": 60.0},
                "address": f"192.0.2.{n}",
                "prefixes": [f"10.0.{n}.0/24"],
                "interfaces": list(SWP),
                "packet_side": {"interface": "eps", "address": f"198.51.100.{n}"},
            }
            for n, (tor, namespace) in enumerate(self.tors.items(), start=1)
        ]
        ocs = [{"id": switch["id"], "driver": "virtual"} for switch in cast(Any, SITE["switches"])]
        # Every far end responds here, on a busy machine with a delay.
        rerouting = {"link_up_s": 60.0, "neighbour_s": 60.0}
        return {"mode": "act", "ocs": ocs, "fabric": {"site": "site.yaml", "routers": routers, "rerouting": rerouting}}

    def _packet_network(self) -> None:
        eps = self.lab.add("eps")
        self.lab.ip(eps, "link", "add", "br0", "type", "bridge")
        self.lab.ip(eps, "link", "set", "br0", "up")
        for n, namespace in enumerate(self.tors.values(), start=1):
            self.lab.veth(namespace, "eps", eps, f"p{n}")
            self.lab.ip(eps, "link", "set", f"p{n}", "master", "br0")
            self.lab.ip(namespace, "addr", "add", f"198.51.100.{n}/24", "dev", "eps")

    def _switch(self, id: str, bridges: Ocs) -> VirtualSwitch:
        switch = VirtualSwitch(id, clock=self.clock, ports=8, connectivity="any_to_any", reconfiguration_s=0.025)
        wire = BridgeWire(switch.model)
        wire.bridges = bridges
        switch._wire = wire
        return switch

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with Journal(self.folder / "journal.sqlite", self.clock.now_s()) as journal:
            edges = DaemonEdges(drivers=self.switches, offload=asyncio.to_thread)
            daemon = build_daemon(self.config, journal, self.clock, edges)
            executor, routing, fabric = daemon.circuits, daemon.fabric.routing, daemon.fabric.coordinator
            assert routing is not None
            assert fabric is not None
            self.routing, self.coordinator = routing, fabric
            tasks = [asyncio.create_task(each) for each in (executor.run(), fabric.run(), routing.maintain())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def at_boundary(self, intent: Intent) -> PeriodReport:
        return await self.coordinator.until_over(self.coordinator.expect(intent, boundary=True))

    def stream(self, source: str, sink: str) -> Stream:
        return Stream(*((self.tors[tor], f"10.0.{TORS.index(tor) + 1}.1") for tor in (source, sink)))

    def sent_over(self, tor: str, interfaces: Sequence[str]) -> int:
        sent = sent_packets(self.tors[tor])
        return sum(sent[interface] for interface in interfaces)

    def lengths(self) -> set[int]:
        """Return the number of cross-connects of each link."""
        return {len(lit.over) for lit in self.routing._lit}


@pytest.fixture
def lab() -> Iterator[Lab]:
    with laboratory() as lab:
        yield lab


async def test_circuits_change_for_a_period_and_packets_follow(lab: Lab, tmp_path: Path) -> None:
    plant = Plant(lab, tmp_path)
    async with plant.running():
        while plant.routing.routed is None:
            await asyncio.sleep(0.01)
        # From the trainer to an engine: over the core, then the packet network again. Between engines: always circuits.
        weights, tokens = plant.stream("train0/r0", "gen0/r0"), plant.stream("gen0/r0", "gen0/r1")
        async with weights, tokens:
            await weights.more(50)
            for intent, lengths, over_circuits in ((SYNC, {1, 3}, True), (GEN, {1}, False), (SYNC, {1, 3}, True)):
                report = await plant.at_boundary(intent)
                assert (report.state, report.detail) == (PeriodState.COMMITTED, "")
                assert plant.routing.routed.faults_text == ""
                assert plant.lengths() == lengths
                assert all(took.route_s > 0 for commit in report.commits for took in commit.switch_times)
                before = {kind: plant.sent_over("train0/r0", kind) for kind in (SWP, ("eps",))}
                await weights.more(100)
                rise = {kind: plant.sent_over("train0/r0", kind) - before[kind] for kind in (SWP, ("eps",))}
                assert rise[SWP if over_circuits else ("eps",)] >= 100
                assert rise[("eps",) if over_circuits else SWP] < 10
    for stream in (weights, tokens):
        assert stream.sent > 400
        assert (stream.lost, max(stream.arrived.values())) == (0, 1)
