"""Circuits for weight syncs: what a sync could have, circuits for the edges of its plan, and those from before again.

The coordinator of circuits (fabric/coordinator.py) decides when and whether: this announces what the edges of a plan
send, waits for what becomes of it, and says which circuits there are then. Whatever comes of it, the sync runs over
what there is. Without an optical fabric the network is as the configuration says, and stays so. Section 5.2 and
appendix E of the paper: circuits of both phases come up before the broadcast, and are torn down after it.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from orchestrrl.core.config.weights import NetworkSettings
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.period_queue import AnnouncedPeriod
from orchestrrl.fabric.periods import PeriodReport, PeriodState
from orchestrrl.weights.controller.actions import BroughtUp, OnPhase, SyncCircuits
from orchestrrl.weights.controller.planning import PlannedSync
from orchestrrl.weights.controller.reports import SyncPhase
from orchestrrl.weights.model import Peer, PeerRole
from orchestrrl.weights.orders import CarryEdge
from planner.fabric.ground import PlanGround
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.light import fibres_of, interfaces_at, links_up
from planner.fabric.model import EndpointId, PortPair
from planner.fabric.plan import FabricState
from planner.fabric.templates import TEMPLATES
from planner.fabric.topology import Site
from planner.model import GpuId, PeerId
from planner.sync_tree.network import NetworkStation, PairLink, SyncNetwork

if TYPE_CHECKING:
    from orchestrrl.core.config.schema import Config

logger = logging.getLogger(__name__)

PERIOD = "weight-sync"
# Not the trainer's: what it announces meanwhile supersedes nothing, and where it runs on, its pauses are waited for.
JOB = "weights"
LOOKED_BACK = 64  # periods
# For a pause of training: nobody is held up by it, and a trainer that announces supersedes it.
TRAINING_WITHIN_S = 600.0
ROUNDING = 1 + 1e-6
Peers = Callable[[], Mapping[PeerId, Peer]]


class PacketNetwork:
    """Without an optical fabric: `weights.network` of the configuration, and where peers say they are."""

    def __init__(self, settings: NetworkSettings, peers: Peers) -> None:
        self._settings = settings
        self._peers = peers

    def network(self) -> SyncNetwork:
        settings = self._settings
        return SyncNetwork(
            settings.link_gbps,
            {id: named_station(peer, settings.nic_gbps) for id, peer in self._peers().items()},
            {pod.id: pod.boundary_circuits for pod in settings.pods},
            {tor.id: tor.circuits for tor in settings.tors},
        )

    async def bring_up(
        self, sync_id: str, planned: PlannedSync, on_phase: OnPhase, *, still: bool = False
    ) -> BroughtUp:
        return BroughtUp(self.network())

    async def tear_down(self, sync_id: str) -> tuple[str, ...]:
        return ()


class CircuitsForSyncs:
    """Over the coordinator of circuits. `packet_tors`: ToRs that an electrical network joins beside the circuits, each
    at `packet_gbps`."""

    def __init__(
        self,
        fabric: CircuitCoordinator,
        peers: Peers,
        *,
        packet_tors: Collection[EndpointId] = (),
        packet_gbps: float = 0.0,
    ) -> None:
        self._fabric = fabric
        self._peers = peers
        self._packets = packet_tors, packet_gbps
        self._partly: set[str] = set()  # syncs that have changed circuits, and not got all of theirs

    def network(self) -> SyncNetwork:
        """Return the network of all lanes and fibres that are sound and free; no switch is read for it."""
        fabric, site = self._fabric, self._fabric.site
        site_reading, word = fabric.site_reading, fabric.overrides
        state = FabricState(
            site_reading.of_site, site_reading.failures | word.failures, word.pinned | site_reading.foreign
        )
        ground = PlanGround(site, state, frozenset(site.pod))
        lanes = Counter({pod: len(free) for pod, free in ground.lanes_for(None).items()})
        tors = Counter(tor.id for tor in site.tors for port in fibres_of(site, tor.id) if port not in ground.held)
        eligible = TEMPLATES[Stage.WEIGHT_SYNC].core_pairs(site.pods)
        pairs = Counter({pair: min(lanes[pair[0]], lanes[pair[1]]) for pair in sorted(eligible)})
        return _network(site, self._stations(), lanes, tors, pairs, *self._packets)

    async def bring_up(
        self, sync_id: str, planned: PlannedSync, on_phase: OnPhase, *, still: bool = False
    ) -> BroughtUp:
        """Circuits for what the plan's edges send. Where nobody says that the trainer stands still, its pauses are
        waited for, if it is traced. Where this is cancelled, nothing more is changed."""
        peers = self._peers()
        job = self._trainer(peers[edge.src] for edge in planned.edges if edge.src in peers) if still else JOB
        intent, notes = intent_of(planned.edges, self._fabric.site, peers, job)
        if not intent.traffic:
            return BroughtUp(await self._present(), notes)
        on_phase(SyncPhase.WINDOW)
        try:
            period = self._fabric.expect(intent, boundary=True)
        except OrchestrRLError as error:
            logger.error("no circuits for weight sync %s: %s", sync_id, error)
            return BroughtUp(await self._present(), (*notes, f"circuits stay as they are: {error}"))
        try:
            report = await self._follow(period, on_phase)
        finally:
            if period.begun.is_set() and period.report.state is not PeriodState.COMMITTED:
                self._partly.add(sync_id)
            if not period.report.over:
                self._fabric.withdraw(period, f"weight sync {sync_id} was given up")
        network = await self._present()
        return BroughtUp(network, (*notes, *_what_became(report), *_not_joined(planned.edges, network)))

    async def tear_down(self, sync_id: str) -> tuple[str, ...]:
        """Who had circuits before, and has not asked for others since, is given them again: generation at once;
        training in a pause of its own, which is not waited for here, since the trainer may wait for the sync's end.
        Harmless where nothing was changed, and after a restart: the journal knows what came up, in which order."""
        periods: list[AnnouncedPeriod] = []
        words: list[str] = []
        before = self._before(sync_id in self._partly)
        self._partly.discard(sync_id)
        for job, stage, name in before:
            try:
                if stage is Stage.TRAIN:
                    self._fabric.announce(name, within_s=TRAINING_WITHIN_S, job=job)
                    words.append(f"{name}: has its circuits again in a pause of training")
                else:  # no broadcast runs any more; where packets are rerouted they leave a circuit before it goes
                    periods.append(self._fabric.announce(name, boundary=True, job=job))
            except OrchestrRLError as error:
                words.append(f"{name}: circuits stay as they are: {error}")
        for period in periods:
            report = await self._fabric.until_over(period)
            words.append(f"{report.period}: {report.state}{_why(report)}")
        return tuple(words)

    def _trainer(self, senders: Iterable[Peer]) -> str:
        """Return the job that is traced on the trainer's hosts."""
        hosts = {peer.host for peer in senders if peer.role is PeerRole.TRAINER}
        return next(iter(sorted(self._fabric.traced_on(hosts))), JOB)

    async def _follow(self, period: AnnouncedPeriod, on_phase: OnPhase) -> PeriodReport:
        over = asyncio.ensure_future(self._fabric.until_over(period))
        begun = asyncio.ensure_future(period.begun.wait())
        try:
            await asyncio.wait({over, begun}, return_when=asyncio.FIRST_COMPLETED)
            if period.begun.is_set():
                on_phase(SyncPhase.CIRCUITS)
            return await over
        finally:
            over.cancel()
            begun.cancel()

    def _before(self, partly: bool) -> list[tuple[str, Stage, str]]:
        """Periods whose circuits a sync took: those that came up before it and have not since. `partly`: the last one
        has come to nothing, but has changed something on its way."""
        up = [(job, stage, name) for (job, stage), name in self._fabric.up.items()]
        syncs = [place for place, (_, stage, _) in enumerate(up) if stage is Stage.WEIGHT_SYNC]
        last = len(up) if partly else max(syncs, default=0)
        coming = {(each.job, each.stage) for each in self._fabric.reports(LOOKED_BACK) if not each.over}
        return [
            (job, stage, name)
            for job, stage, name in up[:last]
            if stage is not Stage.WEIGHT_SYNC and (job, stage) not in coming
        ]

    async def _present(self) -> SyncNetwork:
        site_reading = await self._fabric.scan()
        return network_of(self._fabric.site, site_reading.of_site, self._stations(), *self._packets)

    def _stations(self) -> dict[PeerId, NetworkStation]:
        return {id: station_of(peer, self._fabric.site) for id, peer in self._peers().items()}


def circuits_of(config: "Config", fabric: CircuitCoordinator | None, peers: Peers) -> SyncCircuits:
    """For the daemon. The electrical network joins the ToRs whose routers say so; where nobody here reroutes packets,
    it is taken to join all, since peers do reach the daemon over something."""
    network = config.weights.network
    if fabric is None or config.fabric is None:
        return PacketNetwork(network, peers)
    routers = config.fabric.routers
    joined = {EndpointId(each.tor) for each in routers if each.packet_side is not None}
    tors = joined if routers else {tor.id for tor in fabric.site.tors}
    return CircuitsForSyncs(fabric, peers, packet_tors=tors, packet_gbps=network.link_gbps)


def network_of(
    site: Site,
    cross_connects: Iterable[PortPair],
    stations: Mapping[PeerId, NetworkStation],
    packet_tors: Collection[EndpointId] = (),
    packet_gbps: float = 0.0,
) -> SyncNetwork:
    """Return the network that these circuits and the packet side make. Ports reserved for responses are left out."""
    ours = [each for each in cross_connects if not any((each.switch, port) in site.reserved for port in each.ports)]
    boundary: Counter[EndpointId] = Counter()
    tors: Counter[EndpointId] = Counter()
    pairs: Counter[tuple[EndpointId, EndpointId]] = Counter()
    names = {tor.id: [f"f{k}" for k in range(len(fibres_of(site, tor.id)))] for tor in site.tors}
    for lit in links_up(site, ours, interfaces_at(site, names)):
        ends = [tor for tor, _ in lit.link.ends]
        tors.update(ends)
        here, there = sorted(site.pod_of[tor] for tor in ends)
        if here != there:
            boundary.update((here, there))
            pairs[here, there] += 1
    return _network(site, stations, boundary, tors, pairs, packet_tors, packet_gbps)


def _network(
    site: Site,
    stations: Mapping[PeerId, NetworkStation],
    boundary: Mapping[EndpointId, int],
    tors: Mapping[EndpointId, int],
    pairs: Mapping[tuple[EndpointId, EndpointId], int],
    packet_tors: Collection[EndpointId],
    packet_gbps: float,
) -> SyncNetwork:
    """Return the network of circuits, counted by PoD, ToR and pair of PoDs, and the packet side where there are none:
    one way to each other PoD, so that by their number none is in another's way."""
    joined = set(packet_tors) if packet_gbps > 0 else set()
    pods = sorted(pod.id for pod in site.pods if any(tor.id in joined for tor in site.tors_of[pod.id]))
    by_packets: dict[tuple[str, str], PairLink] = {pair: PairLink(1, packet_gbps) for pair in combinations(pods, 2)}
    by_circuits = {pair: PairLink(count, site.link_gbps) for pair, count in sorted(pairs.items()) if count}
    ways_out = dict.fromkeys(pods, max(1, len(site.pods) - 1))
    return SyncNetwork(
        site.link_gbps,
        stations,
        {pod.id: boundary.get(pod.id) or ways_out.get(pod.id, 0) for pod in site.pods},
        {tor.id: tors.get(tor.id) or int(tor.id in joined) for tor in site.tors},
        by_packets | by_circuits,
    )


def station_of(peer: Peer, site: Site) -> NetworkStation:
    """Return the station of a peer by its GPU's NIC, else by the names of its place."""
    place = peer.place
    if place.gpu is None or GpuId(place.gpu) not in site.server_of:
        if place.gpu is not None:
            logger.warning("peer %s is at GPU %d, which is none of the site's: by name, then", peer.id, place.gpu)
        return named_station(peer, site.nic_gbps)
    gpu = GpuId(place.gpu)
    return NetworkStation(site.server_of[gpu].pod, site.tor_of(gpu), place.nic_gbps or site.nic_gbps)


def named_station(peer: Peer, nic_gbps: float) -> NetworkStation:
    return NetworkStation(peer.place.pod, peer.place.tor, peer.place.nic_gbps or nic_gbps)


def intent_of(
    edges: Iterable[CarryEdge], site: Site, peers: Mapping[PeerId, Peer], job: str = JOB
) -> tuple[Intent, tuple[str, ...]]:
    """Return the traffic of edges, GPU by GPU, and notes on peers that are not in it. An edge has sent all
    of it once it is over, so both phases have their circuits at once."""
    sent: Counter[tuple[int, int]] = Counter()
    nowhere: set[str] = set()
    for edge in edges:
        ends = [_gpu_of(peers[end], site) if end in peers else None for end in (edge.src, edge.dst)]
        nowhere |= {end for end, gpu in zip((edge.src, edge.dst), ends, strict=True) if gpu is None}
        one, other = ends
        if one is not None and other is not None and one != other:
            sent[one, other] += edge.bytes
    by_bytes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair, count in sorted(sent.items()):
        by_bytes[count].append(pair)
    traffic = tuple(
        Traffic(TrafficOperation.WEIGHT_SYNC, Primitive.PIPELINE, tuple(pairs), float(count))
        for count, pairs in sorted(by_bytes.items())
    )
    notes = [f"no circuits for {', '.join(sorted(nowhere))}: no place of the site is known of them"] if nowhere else []
    return Intent(PERIOD, Stage.WEIGHT_SYNC, traffic, job=job), tuple(notes)


def _gpu_of(peer: Peer, site: Site) -> int | None:
    """Its own, or some GPU below the same ToR."""
    if peer.place.gpu is not None and GpuId(peer.place.gpu) in site.server_of:
        return peer.place.gpu
    below = (gpu for gpu in sorted(site.server_of) if site.tor_of(gpu) == peer.place.tor)
    return next(below, None)


def _what_became(report: PeriodReport) -> tuple[str, ...]:
    if report.state is PeriodState.COMMITTED:
        return ()  # what else there is to say of the period is told with it
    partly = f" ({report.stages_done} of {report.stages} stages were done)" if report.stages_done else ""
    return (f"circuits of the sync are not up{partly}, {report.state}{_why(report)}", *report.notes)


def _why(report: PeriodReport) -> str:
    return f" ({report.code}: {report.detail})" if report.detail else f" ({report.code})"


def _not_joined(edges: Iterable[CarryEdge], network: SyncNetwork) -> tuple[str, ...]:
    """Return notes on PoDs between which edges of one wave have less than was planned."""
    assert network.pairs is not None
    asked: defaultdict[tuple[tuple[str, str], int], dict[str, float]] = defaultdict(dict)
    for edge in edges:
        ends = [network.stations[end].pod for end in (edge.src, edge.dst) if end in network.stations]
        if len(set(ends)) == 2:
            one, other = sorted(ends)
            ways = asked[(one, other), edge.wave]
            ways[ends[0]] = ways.get(ends[0], 0.0) + edge.rate_gbps  # each way by itself
    found: dict[str, None] = {}
    for ((one, other), _), gbps in sorted(asked.items()):
        link, most_gbps = network.pairs.get((one, other)), max(gbps.values())
        if link is None:
            found[f"nothing joins {one} and {other}"] = None
        elif link.gbps < network.link_gbps:
            found[f"{one} and {other} are joined by the packet side alone, at {link.gbps:g} Gbps"] = None
        elif most_gbps > link.circuits * link.gbps * ROUNDING:
            has_gbps = link.circuits * link.gbps
            found[f"{one} and {other} have circuits for {has_gbps:g} Gbps, the plan fills {most_gbps:g}"] = None
    return tuple(found)
