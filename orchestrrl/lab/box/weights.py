"""Run weight syncs in a box: send real bytes from training hosts to generation hosts, over circuits that are set up for
each sync.

Three methods are compared: a tree that is planned for the available circuits, direct transfers from the holders of the
shards to every receiver, and the two-stage scheme. Each round begins with a different method. Each host is a process in
its own network namespace with OrchestrRL's carrier and transport. For each run of a method, the hosts create new files,
and the daemon sets up circuits for the edges of the method.
"""

import asyncio
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import Permanent
from orchestrrl.daemon.weight_circuits import intent_of, network_of, station_of
from orchestrrl.fabric.client import FabricClient
from orchestrrl.fabric.periods import PeriodReport, PeriodState
from orchestrrl.lab.box import intents
from orchestrrl.lab.box.cabling import port_name
from orchestrrl.lab.box.namespaces import within
from orchestrrl.lab.box.plan import PACKET_SIDE_SHARE
from orchestrrl.lab.box.run import BoxOrder
from orchestrrl.lab.box.testbed import Testbed
from orchestrrl.lab.box.traffic import Flow, mbps, running
from orchestrrl.lab.box.weights_carrier import CARRY, FOLDER, MAP, opened, sha256_of
from orchestrrl.lab.testbed.processes import REPOSITORY, LabProcess
from orchestrrl.weights.controller.planning import PlannedSync, plan_sync
from orchestrrl.weights.model import Peer, PeerLocation, PeerRole, ShardMap, TensorMeta
from orchestrrl.weights.orders import CarryEdge, CarryEdges
from orchestrrl.weights.publication import Publication
from planner.fabric.intent import Intent
from planner.fabric.topology import PodRole
from planner.model import PeerId
from planner.sync_tree.network import SyncNetwork

VERSION = 1
CHUNK_BYTES = 256 * 1024
STALL_S = 30.0
TENSORS = 4
ROW_BYTES = 16 * 1024  # bytes of a tensor row; ranks divide the rows
STARTED_WITHIN_S = 120.0
PAYLOAD_FOR_S, PAYLOAD_TIMES, WARM_UP_S = 0.5, 4, 1.0
Stages = tuple[tuple[CarryEdge, ...], ...]  # a stage starts when all edges of the previous one have ended


@asynccontextmanager
async def _hosts(box: Testbed, transport: str, python: str) -> AsyncIterator[tuple[list[Peer], LabProcess]]:
    """Yield one peer per server of the site, with the address of the NIC of the server's first GPU. Also yield the
    process that runs the carriers of all peers."""
    servers = {PeerId(str(server.id)): server for server in sorted(box.site.servers, key=lambda server: str(server.id))}
    # A NIC (namespace, address) becomes [peer, address, namespace].
    places = [[id, *reversed(box.plan.nic_of(server.gpus[0]))] for id, server in servers.items()]
    words = (python, "-m", "orchestrrl.lab.box.weights_carrier", transport, json.dumps(places))
    environment = {"PYTHONPATH": str(REPOSITORY)}
    async with LabProcess("carriers", words, box.folder, environment=environment, takes_input=True) as carriers:
        addresses = json.loads(await carriers.next_line(STARTED_WITHIN_S))
        peers = []
        for id, server in servers.items():
            role = PeerRole.TRAINER if box.site.pod[server.pod].role is PodRole.TRAIN else PeerRole.ENGINE
            peers.append(Peer(id, role, id, PeerLocation(gpu=int(server.gpus[0])), {transport: addresses[id]}))
        yield peers, carriers


def publications(trainers: Sequence[PeerId], size: int) -> list[Publication]:
    """Return one publication per trainer rank. The tensors have about `size` bytes in total, and all ranks hold the
    same number of rows, up to rounding."""
    rows = max(len(trainers), round(size / (TENSORS * ROW_BYTES)))
    tensors = tuple(TensorMeta(f"layers.{k}.weight", "U8", (rows, ROW_BYTES)) for k in range(TENSORS))
    found = []
    for rank, peer in enumerate(trainers):
        own = (rank * rows // len(trainers), (rank + 1) * rows // len(trainers))
        boxes = {each.name: ((own, (0, ROW_BYTES)),) for each in tensors}
        found.append(Publication(VERSION, rank, len(trainers), peer, tensors, boxes))
    return found


async def weights(box: Testbed, order: BoxOrder) -> dict[str, Any]:
    ways = order.sync_ways
    async with (
        _hosts(box, order.transport, order.python or sys.executable) as (peers, carriers),
        FabricClient(box.daemon_address) as client,
    ):
        show = _Show(box, client, peers, carriers, order.sync_bytes)
        await show.measure_payload()
        for number in range(order.sync_rounds):
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                await show.go(way, number)
        return show.report()


class _Show:
    def __init__(
        self, box: Testbed, client: FabricClient, peers: Sequence[Peer], carriers: LabProcess, size: int
    ) -> None:
        self._box = box
        self._client = client
        self._carriers = carriers
        self._peers = {peer.id: peer for peer in peers}
        self._stations = stations = {id: station_of(peer, box.site) for id, peer in self._peers.items()}
        engines = (peer.id for peer in peers if peer.role is PeerRole.ENGINE)
        self._receivers = sorted(engines, key=lambda id: (stations[id].pod, stations[id].tor, id))  # ToR by ToR
        trainers = [id for id, peer in self._peers.items() if peer.role is PeerRole.TRAINER]
        self._publications = publications(trainers, size)
        self._payload = 1.0  # TCP payload as a fraction of a line's rate
        self._planned = self._plan()
        whole = opened(FOLDER / "whole", self._planned.map, {shard.id for shard in self._planned.map.shards})
        self._sha256 = sha256_of(whole.folder)
        shutil.rmtree(whole.folder)
        self._rows: list[dict[str, Any]] = []

    async def _open(self) -> None:
        """Order the holders of the shards to create files that contain these shards, and all other peers to create
        empty files. Data that was received before is deleted."""
        held: dict[PeerId, list[str]] = {id: [] for id in self._peers}
        for shard, holder in self._planned.summed_by.items():
            held[holder].append(shard)
        document = MAP.dump_python(self._planned.map, mode="json")
        await self._order({id: {"open": document, "holds": held[id]} for id in self._peers})

    async def _order(self, orders: Mapping[PeerId, Mapping[str, Any]]) -> dict[PeerId, Any]:
        """Send orders to peers, and return the peers' responses when all orders have been carried out."""
        answers: dict[PeerId, Any] = await self._carriers.request({str(id): order for id, order in orders.items()})
        return {id: answers[id] for id in orders}

    async def measure_payload(self) -> None:
        """Measure the rate at which one connection transfers TCP payload over one circuit between PoDs."""
        await self._circuits((self._planned.edges,))
        source = next(id for id, peer in self._peers.items() if peer.role is PeerRole.TRAINER)
        first = {PeerId(str(server.id)): server.gpus[0] for server in self._box.site.servers}
        sent_from, sent_to = (self._box.plan.nic_of(first[id]) for id in (source, self._receivers[0]))
        flow = Flow(sent_from, sent_to)
        async with running([flow]):
            await asyncio.sleep(WARM_UP_S)
            times_s = [time.monotonic()]
            for _ in range(PAYLOAD_TIMES):
                await asyncio.sleep(PAYLOAD_FOR_S)
                times_s.append(time.monotonic())
            # The maximum of several: a busy machine must not loosen the bound.
            rate_mbps = max(mbps([flow], *each) for each in pairwise(times_s))
        self._payload = min(1.0, rate_mbps / (self._gbps(self._box.site.link_gbps) * 1000))

    async def go(self, way: str, number: int) -> None:
        stages, circuits = await self._prepared(way)
        await self._open()
        counted = self._boundary_bytes()
        busy_s, since_s = _busy_s(), time.monotonic()
        began_s = time.time()
        ended_s = began_s
        for stage in stages:
            ended_s = max(ended_s, await self._carried(stage))
        cores = (_busy_s() - busy_s) / (time.monotonic() - since_s)
        row = {
            "way": way,
            "round": number,
            "seconds": ended_s - began_s,
            "carried_bytes": sum(edge.bytes for stage in stages for edge in stage),
            "crossing_bytes": sum(
                edge.bytes for stage in stages for edge in stage if self._crosses(edge.src, edge.dst)
            ),
            "crossed_bytes": self._boundary_bytes() - counted,
            "cores_busy": cores,
            "circuits": circuits,
            "identical": await self._identical(),
        }
        if way == "tree":
            row["estimate_s"] = self._planned.plan.estimate_s
        self._rows.append(row)

    def report(self) -> dict[str, Any]:
        """Return the results of all methods. `bound_s` is a lower bound on the duration of any plan at the measured TCP
        payload rate of a circuit."""
        planned = self._planned
        return {
            "bytes": planned.map.bytes,
            "receivers": len(self._receivers),
            "sha256": self._sha256,
            "circuit_mbps": self._gbps(self._box.site.link_gbps) * 1000,
            "payload": self._payload,
            "bound_s": planned.plan.lower_bound_s,
            "waves": len(planned.plan.waves),
            "rows": self._rows,
        }

    async def _prepared(self, way: str) -> tuple[Stages, dict[str, Any]]:
        """Set up the circuits that the method `way` requests. Return the method's edges by stage, and a report on the
        circuit change. A tree is planned again for the circuits that were set up."""
        if way == "tree":
            circuits = await self._circuits((self._planned.edges,))
            self._planned = self._plan()
            return (self._planned.edges,), circuits
        stages = self._naive() if way == "naive" else self._two_stage()
        return stages, await self._circuits(stages)

    def _naive(self) -> Stages:
        """Return one stage of edges in which every receiver receives each shard directly from the shard's holder."""
        shards, holders = self._planned.map.shards, self._planned.summed_by
        return (self._edges("x", [(shard, holders[shard.id], other) for shard in shards for other in self._receivers]),)

    def _two_stage(self) -> Stages:
        """Return the edges of the scheme in figure 4 of the paper, by stage. In the first stage, the training hosts
        send all shards once to the first replica of each PoD. In the second stage, the shards pass from replica to
        replica in a chain through the PoD, one ToR after another. The chain is pipelined, as in collective libraries.
        """
        chains = [list(pod) for _, pod in groupby(self._receivers, key=lambda id: self._stations[id].pod)]
        shards, holders = self._planned.map.shards, self._planned.summed_by
        across = [(shard, holders[shard.id], chain[0]) for shard in shards for chain in chains]
        along = [(shard, *hop) for shard in shards for chain in chains for hop in pairwise(chain)]
        return self._edges("x", across), self._edges("y", along)

    def _edges(self, letter: str, hops: Iterable[tuple[ShardMap, PeerId, PeerId]]) -> tuple[CarryEdge, ...]:
        """Return one edge for each hop (shard, source, destination). Each edge carries a whole shard. `letter` is the
        prefix of the edges' ids."""
        made = []
        for number, (shard, src, dst) in enumerate(hops):
            (transport, address), *_ = self._peers[dst].transports.items()
            phase: Literal["A", "B"] = "A" if self._crosses(src, dst) else "B"
            flow = shard.id, 0, shard.bytes, src, dst, 0, phase
            made.append(CarryEdge(*flow, id=f"{letter}{number}", transport=transport, address=address))
        return tuple(made)

    def _crosses(self, src: PeerId, dst: PeerId) -> bool:
        """Return whether an edge from `src` to `dst` leads from one PoD into another."""
        return self._stations[src].pod != self._stations[dst].pod

    async def _circuits(self, stages: Stages) -> dict[str, Any]:
        """Announce the intent of generation, and then the intent of the stages' edges, as the daemon does for a sync.
        No traffic is sent meanwhile. Return a report on the change of circuits for the second intent: the number of
        moves, and the duration in seconds."""
        await self._committed(intents.generation(self._box.site))
        intent, _ = intent_of([edge for stage in stages for edge in stage], self._box.site, self._peers)
        report = await self._committed(intent)
        return {
            "moves": sum(commit.moves for commit in report.commits),
            "elapsed_s": sum(commit.usable_s - commit.commanded_s for commit in report.commits),
        }

    async def _committed(self, intent: Intent) -> PeriodReport:
        """Announce an intent and return the report of its period. Raises Permanent if the intent's circuits are not
        committed."""
        report = await self._client.announce(intent.period, intent, boundary=True)
        if report.state is not PeriodState.COMMITTED:
            raise Permanent(f"circuits of {intent.period}: {report.state} {report.code}: {report.detail}")
        return report

    def _network(self) -> SyncNetwork:
        """Return the network of the box for planning, with all rates reduced to the measured share of TCP payload. If
        no circuits are set up, the network has all possible circuits."""
        plan, share = self._box.plan, self._gbps(1.0) * self._payload
        site = replace(plan.site, link_gbps=plan.site.link_gbps * share, nic_gbps=plan.site.nic_gbps * share)
        stations = {id: station_of(peer, site) for id, peer in self._peers.items()}
        if joined := self._box.panel.joined:
            return network_of(site, joined, stations, list(plan.tors), site.link_gbps * PACKET_SIDE_SHARE)
        # No circuit is up yet: plan with all possible circuits.
        lanes: dict[str, int] = Counter(site.pod_of[lane.uplink] for lane in site.lanes)
        return SyncNetwork(site.link_gbps, stations, lanes, {tor: len(names) for tor, names in plan.interfaces.items()})

    def _plan(self) -> PlannedSync:
        settings = WeightSettings(chunk_bytes=CHUNK_BYTES, hop_latency_s=0.002)
        return plan_sync(VERSION, self._publications, self._peers.values(), self._network(), settings)

    async def _carried(self, stage: Sequence[CarryEdge]) -> float:
        """Carry out a stage of edges. Return the Unix time at which the last byte arrived, as reported by its receiver.
        Raises Permanent if an edge fails."""
        own: dict[PeerId, list[CarryEdge]] = {}
        for edge in stage:
            own.setdefault(edge.src, []).append(edge)
            own.setdefault(edge.dst, []).append(edge)
        orders = {id: CarryEdges(VERSION, tuple(edges), CHUNK_BYTES, STALL_S) for id, edges in own.items()}
        ended = await self._order(
            {id: {"carry": CARRY.dump_python(order, mode="json")} for id, order in orders.items()}
        )
        if broken := [f"{id}: {fault}" for id, answer in ended.items() for fault in answer["broken"]]:
            raise Permanent("; ".join(broken))
        return max(float(answer["ended_s"]) for answer in ended.values())

    async def _identical(self) -> int:
        """Return the number of receivers whose data is identical to the data that was sent."""
        sums = await self._order({id: {"sum": True} for id in self._receivers})
        return sum(each["sha256"] == self._sha256 and not each["missing"] for each in sums.values())

    def _boundary_bytes(self) -> int:
        """Return the number of bytes, including headers, that the core has sent into generation PoDs so far. It is read
        from the counters of the core's ports."""
        site, carried = self._box.site, 0
        for switch in site.core_switches:
            counts = _sent_bytes(self._box.plan.switches[switch.id])
            for uplink, ports in switch.ports.items():
                if site.pod[site.pod_of[uplink]].role is PodRole.GEN:
                    carried += sum(counts.get(port_name(port), 0) for port in ports)
        return carried

    def _gbps(self, gbps: float) -> float:
        """Return the rate in the box, in Gbps, that represents the rate `gbps` of the site."""
        return gbps * self._box.plan.bps_per_gbps * 1e-9


def _sent_bytes(room: str) -> dict[str, int]:
    """Return the number of bytes that each interface of the namespace `room` has sent, by interface name."""
    _, _, *lines = within(room, Path("/proc/thread-self/net/dev").read_text).splitlines()
    rows = (line.partition(":") for line in lines)
    return {name.strip(): int(counts.split()[8]) for name, _, counts in rows}


def _busy_s() -> float:
    """Return the busy time of the machine in seconds, summed over all cores and processes."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
