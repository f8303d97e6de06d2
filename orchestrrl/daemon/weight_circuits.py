"""Provide circuits for weight syncs: report the network that circuits could form, bring up circuits for the edges of a
plan, and restore the previous circuits after the sync.

The circuit coordinator (fabric/coordinator.py) decides whether and when circuits change. This module announces the
traffic of a plan's edges, waits for the result, and returns the network that the circuits then form. If circuits could
not be changed, the sync uses those that are up. Without an optical fabric, the network is the configured one. According
to section 5.2 and appendix E of the paper, the circuits of both phases of a sync are brought up before the broadcast,
and torn down after it.
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
# A job of its own: the trainer's announcements do not supersede it, and the trainer's pauses are waited for.
JOB = "weights"
LOOKED_BACK = 64  # periods
# Wait for a pause of training: it delays nothing, and an announcement of the trainer supersedes it.
TRAINING_WITHIN_S = 600.0
ROUNDING = 1 + 1e-6
Peers = Callable[[], Mapping[PeerId, Peer]]


class PacketNetwork:
    """The network of a site without an optical fabric, derived from `weights.network` in the configuration and the PoDs
    and ToRs that peers report."""

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
    """Provides the circuits of weight syncs through the circuit coordinator. `packet_tors` are the ToRs that an
    electrical network also connects, each at `packet_gbps`."""

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
        self._partly: set[str] = set()  # syncs that changed circuits but did not get all of theirs

    def network(self) -> SyncNetwork:
        """Return the network that all healthy and free lanes and fibres could form, without reading a switch."""
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
        """Bring up circuits for the traffic of the plan's edges and return the network that then exists. If the trainer
        is traced, wait for its next pause, unless `still` is True because the trainer is known to be idle. `on_phase`
        is called at the start of each phase. If the call is cancelled, no further circuit is changed."""
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
            return BroughtUp(await self._present(), (*notes, f"circuits remain unchanged: {error}"))
        try:
            report = await self._follow(period, on_phase)
        finally:
            if period.begun.is_set() and period.report.state is not PeriodState.COMMITTED:
                self._partly.add(sync_id)
            if not period.report.over:
                self._fabric.withdraw(period, f"weight sync {sync_id} was abandoned")
        network = await self._present()
        return BroughtUp(network, (*notes, *_what_became(report), *_not_joined(planned.edges, network)))

    async def tear_down(self, sync_id: str) -> tuple[str, ...]:
        """Restore the circuits from before the sync, unless their jobs have requested other circuits since. Return
        notes for the report of the sync.

        The circuits of generation are restored at once. The circuits of training are restored in the trainer's next
        pause. This call does not wait for the pause, since the trainer may be waiting for the sync's end. The call is
        idempotent. This also holds after a restart of the daemon, because the order in which circuits came up is read
        from the journal.
        """
        periods: list[AnnouncedPeriod] = []
        words: list[str] = []
        before = self._before(sync_id in self._partly)
        self._partly.discard(sync_id)
        for job, stage, name in before:
            try:
                if stage is Stage.TRAIN:
                    self._fabric.announce(name, within_s=TRAINING_WITHIN_S, job=job)
                    words.append(f"{name}: circuits are restored in a pause of training")
                else:  # the broadcast is over; rerouting drains packets from a circuit before it goes down
                    periods.append(self._fabric.announce(name, boundary=True, job=job))
            except OrchestrRLError as error:
                words.append(f"{name}: circuits remain unchanged: {error}")
        for period in periods:
            report = await self._fabric.until_over(period)
            words.append(f"{report.period}: {report.state}{_why(report)}")
        return tuple(words)

    def _trainer(self, senders: Iterable[Peer]) -> str:
        """Return the job that is traced on the hosts of the trainers among `senders`, or JOB if none is traced."""
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
        """Return (job, stage, name) of each period whose circuits the last sync replaced. These are the periods whose
        circuits came up before the sync, and have not come up again or been requested since. If the sync failed after
        it had changed circuits (`partly`), every period whose circuits came up counts as earlier."""
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
    """Return the provider of circuits for the daemon's weight syncs. Beside the optical fabric, an electrical network
    connects the ToRs whose routers have a packet side. If no routers are configured, this network is assumed to connect
    all ToRs, since all peers can reach the daemon."""
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
    """Return the network that the cross-connects and the electrical network form. Cross-connects of reserved ports,
    such as the ports that carry responses from engines to trainers, are left out."""
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
    """Return the network formed by circuits and the electrical network. `boundary`, `tors` and `pairs` hold the number
    of circuits that leave each PoD, of each ToR, and between each pair of PoDs, respectively. The electrical network
    connects PoDs that no circuit connects. It is modelled as one link from each PoD to each other PoD, so that the
    number of links is not a limit."""
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
    """Return the network station of a peer, derived from its GPU or, if the GPU is unknown, from the names of its PoD
    and ToR."""
    place = peer.place
    if place.gpu is None or GpuId(place.gpu) not in site.server_of:
        if place.gpu is not None:
            logger.warning("peer %s has GPU %d, which is not in the site: placing it by its names", peer.id, place.gpu)
        return named_station(peer, site.nic_gbps)
    gpu = GpuId(place.gpu)
    return NetworkStation(site.server_of[gpu].pod, site.tor_of(gpu), place.nic_gbps or site.nic_gbps)


def named_station(peer: Peer, nic_gbps: float) -> NetworkStation:
    return NetworkStation(peer.place.pod, peer.place.tor, peer.place.nic_gbps or nic_gbps)


def intent_of(
    edges: Iterable[CarryEdge], site: Site, peers: Mapping[PeerId, Peer], job: str = JOB
) -> tuple[Intent, tuple[str, ...]]:
    """Return an intent with the traffic of the edges per pair of GPUs, and notes on peers without a known GPU. The
    bytes of both phases of the sync are included, so that the circuits of both phases are brought up together."""
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
    notes = [f"no circuits for {', '.join(sorted(nowhere))}: their place in the site is unknown"] if nowhere else []
    return Intent(PERIOD, Stage.WEIGHT_SYNC, traffic, job=job), tuple(notes)


def _gpu_of(peer: Peer, site: Site) -> int | None:
    """Return the peer's own GPU. If it is unknown, return the first GPU under the same ToR, or None if there is no such
    GPU."""
    if peer.place.gpu is not None and GpuId(peer.place.gpu) in site.server_of:
        return peer.place.gpu
    below = (gpu for gpu in sorted(site.server_of) if site.tor_of(gpu) == peer.place.tor)
    return next(below, None)


def _what_became(report: PeriodReport) -> tuple[str, ...]:
    if report.state is PeriodState.COMMITTED:
        return ()  # further notes are reported with the period
    partly = f" ({report.stages_done} of {report.stages} stages were done)" if report.stages_done else ""
    return (f"circuits of the sync are not up{partly}, {report.state}{_why(report)}", *report.notes)


def _why(report: PeriodReport) -> str:
    return f" ({report.code}: {report.detail})" if report.detail else f" ({report.code})"


def _not_joined(edges: Iterable[CarryEdge], network: SyncNetwork) -> tuple[str, ...]:
    """Return a note on each pair of PoDs between which the edges of one wave have less bandwidth than planned."""
    assert network.pairs is not None
    asked: defaultdict[tuple[tuple[str, str], int], dict[str, float]] = defaultdict(dict)
    for edge in edges:
        ends = [network.stations[end].pod for end in (edge.src, edge.dst) if end in network.stations]
        if len(set(ends)) == 2:
            one, other = sorted(ends)
            ways = asked[(one, other), edge.wave]
            ways[ends[0]] = ways.get(ends[0], 0.0) + edge.rate_gbps  # per direction
    found: dict[str, None] = {}
    for ((one, other), _), gbps in sorted(asked.items()):
        link, most_gbps = network.pairs.get((one, other)), max(gbps.values())
        if link is None:
            found[f"no link joins {one} and {other}"] = None
        elif link.gbps < network.link_gbps:
            found[f"{one} and {other} are joined only by the packet side, at {link.gbps:g} Gbps"] = None
        elif most_gbps > link.circuits * link.gbps * ROUNDING:
            has_gbps = link.circuits * link.gbps
            found[f"{one} and {other} have circuits for {has_gbps:g} Gbps, the plan uses {most_gbps:g}"] = None
    return tuple(found)
