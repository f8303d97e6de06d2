"""RFabric (section 5 of the OrchestrRL paper): rail-aligned ToRs that switch packets, optical switches above them.

Circuits are those that the fabric's own planner materialises for a period's demand (planner/fabric/materialize.py):
ports, lanes and the slice for responses as on a real site. Packets go over circuits between their two ToRs; where there
are none, over as few other ToRs as lead there. Circuits of a period are worked out from those at rest, which join all
ToRs of a rail evenly. One circuit stays between each PoD and the next: connectivity is kept (section 5.4). ToRs of
PoDs with fewer than three servers have too few fibres for that.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from orchestrrl.sim.net.fabrics.base import NOTHING, Failures, Inventory, Period
from orchestrrl.sim.net.fabrics.circuits import CircuitLinks
from orchestrrl.sim.net.fabrics.fat_tree import SERVERS_PER_POD
from orchestrrl.sim.net.fabrics.hosts import NO_NIC, Bools, Hosts, Legs, joined
from orchestrrl.sim.net.fabrics.multipath import NO_WAY, Edges, distances
from orchestrrl.sim.net.fabrics.options import at_least, one_of, refuse
from orchestrrl.sim.net.fabrics.wiring import Rows, Wiring
from orchestrrl.sim.net.model import Floats, Flows, Ints, Network, Routes, Servers, Tier
from planner.fabric.coupling import lanes_by_core_port, partners, port_owners
from planner.fabric.generate import regular_site
from planner.fabric.intent import Intent, Operation, Primitive, Stage, Traffic
from planner.fabric.materialize import materialize
from planner.fabric.model import EndpointId, OcsId, PortPair
from planner.fabric.plan import FabricState
from planner.fabric.plan import Failures as FailedPorts
from planner.fabric.shape import Fault, Shape
from planner.fabric.templates import Shape as Announced
from planner.fabric.templates import Spare, Template, template_of
from planner.fabric.topology import DEVICES, Role, Site
from planner.fabric.topology import Tier as SiteTier
from planner.model import GpuId, Hold

ALLOCATIONS = ("traffic", "uniform", "fixed")
LONGEST = 2  # circuits of a way on a message's own rail
_EITHER = frozenset(Role)
_ANY_TWO = frozenset((one, other) for one in Role for other in Role)


def rfabric(
    servers: Servers,
    *,
    train_servers: int | None = None,
    servers_per_pod: int = SERVERS_PER_POD,
    servers_per_tor: int | None = None,
    core_lanes: int | None = None,
    tor_uplinks: int | None = None,
    device: str = "piezo_polatis",
    allocation: str = "traffic",
) -> "RFabric":
    """The first `train_servers` are in Train PoDs, the others in Gen PoDs, and each stage touches those that its
    template names; None: PoDs have no roles, and a period touches those that it has traffic in. `core_lanes` of a PoD
    and `tor_uplinks` of a ToR: None for half as many as its ToRs have, and for as many as it has NICs (see Shape).
    `allocation`: by the traffic of each period; `uniform` over the pairs that have any; `fixed`: as at rest."""
    train = servers.count if train_servers is None else train_servers
    refuse(
        *at_least("servers_per_pod", servers_per_pod, 1),
        *at_least("train_servers", train, 0),
        *one_of("device", device, tuple(DEVICES)),
        *one_of("allocation", allocation, ALLOCATIONS),
    )
    if train > servers.count:
        refuse(Fault("train_servers", f"must be <= {servers.count}, all servers", train))
    parts = [count for count in (train, servers.count - train) if count]
    per_pod = max(-(-count // -(-count // servers_per_pod)) for count in parts)
    site = regular_site(
        Shape(
            train_pods=-(-train // per_pod),
            gen_pods=-(-(servers.count - train) // per_pod),
            servers_per_pod=per_pod,
            gpus_per_server=servers.gpus_per_server,
            nics_per_server=servers.nics_per_server,
            servers_per_tor=servers_per_tor,
            tor_uplinks=tor_uplinks,
            core_lanes=core_lanes,
            link_gbps=servers.nic_gbps,
            nic_gbps=servers.nic_gbps,
            agg_device=DEVICES[device],
            core_device=DEVICES[device],
        )
    )
    place = np.concatenate([np.arange(train), -(-train // per_pod) * per_pod + np.arange(servers.count - train)])
    return RFabric(servers, site, place, train_servers is not None, allocation)


@dataclass(frozen=True)
class RFabric:
    servers: Servers
    site: Site
    place: Ints  # [server], which of the site's it is
    roles: bool
    allocation: str = "traffic"
    failed: Failures = NOTHING
    _plans: dict[str, frozenset[PortPair]] = field(default_factory=dict, compare=False, repr=False)
    _networks: dict[frozenset[PortPair], Network] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return "rfabric"

    @property
    def reconfigures_s(self) -> float:
        return max(each.device.reconfiguration_s for each in self.site.switches) if self.site.switches else 0.0

    def network(self, period: Period | None = None) -> Network:
        cross_connects = self.cross_connects(period)
        if cross_connects not in self._networks:
            self._networks[cross_connects] = self._network(self.circuits(cross_connects))
        return self._networks[cross_connects]

    def changes(self, before: Period | None, after: Period) -> bool:
        return self.cross_connects(before) != self.cross_connects(after)

    def without(self, failed: Failures) -> "RFabric":
        return replace(self, failed=joined(self.failed, failed), _plans={}, _networks={})

    def inventory(self) -> Inventory:
        """A NIC's link has a transceiver at either end and a port at the ToR; a ToR's fibre one transceiver and port,
        and a port of an OCS. A lane to the core is a fibre between two ports of OCSs."""
        nics, site = self.servers.nics, self.site
        fibres = {tier: sum(map(len, ends.values())) for tier, ends in site.fibres.items()}
        lanes = len(site.lanes)
        up = fibres[SiteTier.AGG] - lanes
        return Inventory(
            transceivers=2 * nics + up,
            nics=nics,
            electrical_ports=nics + up,
            ocs_ports=up + 2 * lanes,
            fibers=nics + up + lanes,
        )

    def cross_connects(self, period: Period | None) -> frozenset[PortPair]:
        if period is None or self.allocation == "fixed":
            return self._at_rest
        if period.id not in self._plans:
            demand = self.tor_demand(period.demand)
            if self.allocation == "uniform":
                demand = np.where(demand > 0, 1.0, 0.0)
            self._plans[period.id] = self._materialized(period.id, Stage(period.stage), demand)
        return self._plans[period.id]

    def circuits(self, cross_connects: frozenset[PortPair]) -> Ints:
        """[tor, tor], how many join the two: in a PoD over its own switches, else over lanes and the core."""
        site, joins, owner = self.site, partners(cross_connects), port_owners(self.site)
        lane_at = lanes_by_core_port(site)
        number = {tor.id: place for place, tor in enumerate(site.tors)}
        found: Counter[tuple[EndpointId | None, ...]] = Counter()
        for each in cross_connects:
            ends: list[EndpointId | None] = []
            for port in each.ports:
                lane = lane_at.get((each.switch, port))
                at, there = (each.switch, port) if lane is None else (lane.agg, joins.get((lane.agg, lane.agg_port)))
                ends.append(None if there is None else owner.get((at, there)))
            found[tuple(ends)] += 1
        matrix = np.zeros((len(number), len(number)), np.int64)
        for (one, other), count in found.items():
            if one in number and other in number and one != other:
                matrix[number[one], number[other]] += count
                matrix[number[other], number[one]] += count
        return matrix

    def tor_demand(self, flows: Flows) -> Floats:
        """[tor, tor], bytes that have to leave a ToR for another. Servers without a NIC have none."""
        here, there = self._hosts.server_of(flows.src), self._hosts.server_of(flows.dst)
        reached: Bools = self._hosts.nic_works.reshape(self.servers.count, -1).sum(axis=1) > 0
        outside = (here != there) & reached[here] & reached[there]
        legs = self._hosts.legs(flows.src[outside], flows.dst[outside])
        one, other = self._tor_of[legs.src_nic], self._tor_of[legs.dst_nic]
        tors = len(self.site.tors)
        sent = np.bincount(one * tors + other, flows.bytes[outside][legs.flow] * legs.share, minlength=tors * tors)
        demand = np.asarray(sent, np.float64).reshape(tors, tors)
        np.fill_diagonal(demand, 0.0)
        return demand

    @cached_property
    def _hosts(self) -> Hosts:
        return Hosts(self.servers, self.failed, rails=True)

    @cached_property
    def _tor_of(self) -> Ints:
        """[nic]"""
        number = {tor.id: place for place, tor in enumerate(self.site.tors)}
        rows = [[number[tor] for tor in self.site.servers[place].tors] for place in self.place.tolist()]
        return np.array(rows, np.int64).ravel()

    @cached_property
    def _pod_of(self) -> Ints:
        """[tor]"""
        number = {pod.id: place for place, pod in enumerate(self.site.pods)}
        return np.array([number[tor.pod] for tor in self.site.tors], np.int64)

    @cached_property
    def _voices(self) -> list[GpuId]:
        """[tor], a GPU that speaks for all that are below it."""
        found: dict[EndpointId, GpuId] = {}
        for server in self.site.servers:
            for gpu in server.gpus:
                found.setdefault(server.tors[server.nic(gpu)], gpu)
        return [found[tor.id] for tor in self.site.tors]

    @cached_property
    def failed_ports(self) -> FailedPorts:
        site, ports = self.site, []
        fibres = site.fibres[SiteTier.AGG]
        for tor, share in sorted((self.failed.tor_uplinks or {}).items()):
            ports += _some(fibres[site.tors[tor].id], share)
        for pod, share in sorted((self.failed.pod_uplinks or {}).items()):
            for uplink in site.uplinks_of[site.pods[pod].id]:
                ports += _some(fibres[uplink.id], share)
        return FailedPorts(ports=frozenset(ports))

    @cached_property
    def _at_rest(self) -> frozenset[PortPair]:
        """All ToRs of a rail alike."""
        rail = np.array([-1 if tor.rail is None else tor.rail for tor in self.site.tors])
        demand = (rail[:, None] == rail[None, :]).astype(np.float64)
        np.fill_diagonal(demand, 0.0)
        intent = self._intent("rest", Stage.TRAIN, demand)
        plan = materialize(self.site, intent, FabricState(failures=self.failed_ports), _anywhere(intent))
        return frozenset() if isinstance(plan, Hold) else plan.cross_connects

    def _materialized(self, period: str, stage: Stage, demand: Floats) -> frozenset[PortPair]:
        bare = Intent(period, stage, ())
        template = template_of(bare) if self.roles else _anywhere(bare)
        demand, ring = np.where(self._eligible(template), demand, 0.0), self._ring(template)
        state = FabricState(current=self._at_rest, failures=self.failed_ports)
        template = replace(template, core_roles=_ANY_TWO)
        # What joins the PoDs: nothing beside the period's own, if that is enough; else after it, else before it.
        first = None
        for weight in (0.0, 1e-6 * demand[demand > 0].min(initial=1.0), demand.max(initial=1.0)):
            joined_up = demand.copy()
            for one, other in ring:
                joined_up[one, other] = max(joined_up[one, other], weight)
            plan = materialize(self.site, self._intent(period, stage, joined_up), state, template)
            found = self._at_rest if isinstance(plan, Hold) else plan.cross_connects
            if self._leads(found):
                return found
            first = first or found
        return first or self._at_rest

    def _eligible(self, template: Template) -> Bools:
        """[tor, tor], whether the stage gives the two circuits."""
        pods = self.site.pods
        joins = np.array(
            [[one is other or (one.role, other.role) in template.core_roles for other in pods] for one in pods]
        )
        touched = np.array([pod.role in template.touched for pod in pods])
        both = (joins | joins.T) & touched[:, None] & touched[None, :]
        return np.asarray(np.asarray(both)[self._pod_of[:, None], self._pod_of[None, :]])

    def _ring(self, template: Template) -> list[tuple[int, int]]:
        """Between each PoD that is touched and the next a pair of ToRs, each on another rail."""
        pods = [place for place, pod in enumerate(self.site.pods) if pod.role in template.touched]
        pairs = []
        for turn, (pod, following) in enumerate(zip(pods, pods[1:] + pods[:1], strict=True)):
            one, other = np.flatnonzero(self._pod_of == pod), np.flatnonzero(self._pod_of == following)
            if pod != following:
                pairs.append((int(one[turn % len(one)]), int(other[turn % len(other)])))
        return pairs

    def _leads(self, cross_connects: frozenset[PortPair]) -> bool:
        """Whether all servers can be reached from all, on whichever rail."""
        hops = distances(Edges.of(self.circuits(cross_connects).astype(np.float64)))
        _, block = np.unique(self._tor_of.reshape(self.servers.count, -1), axis=0, return_index=True)
        tors = self._tor_of.reshape(self.servers.count, -1)[block]  # [block, rail]
        return all((hops[np.ix_(one, other)] < NO_WAY).any() for one in tors for other in tors)

    def _intent(self, period: str, stage: Stage, demand: Floats) -> Intent:
        traffic = tuple(
            Traffic(
                Operation.DP,
                Primitive.PIPELINE,
                ((int(self._voices[one]), int(self._voices[other])),),
                float(demand[one, other]),
            )
            for one, other in np.argwhere(demand > 0).tolist()
        )
        return Intent(period, stage, traffic)

    def _network(self, circuits: Ints) -> Network:
        servers, hosts = self.servers, self._hosts
        wiring = Wiring()
        first_up = hosts.lay(wiring, hosts.nodes + self._tor_of)
        apart = self._pod_of[:, None] != self._pod_of[None, :]
        links = CircuitLinks.lay(
            wiring,
            np.asarray(circuits * servers.nic_bytes_per_s, np.float64),
            np.where(apart, Tier.CORE, Tier.AGG),
            np.where(apart, 4, 2) * servers.propagation_s,
            hosts.nodes,
        )

        hops = distances(links.edges)

        def router(src: Ints, dst: Ints) -> Routes:
            legs = self._on_rails_that_lead(hosts.legs(src, dst), hops)

            def between(rows: Rows, some: Ints) -> Floats:
                one, other = self._tor_of[legs.src_nic[some]], self._tor_of[legs.dst_nic[some]]
                return servers.processing_s + links.add(rows, some, one, other, servers.processing_s)

            return hosts.routes(legs, first_up, between)

        return wiring.network(servers, router, self.name)

    def _on_rails_that_lead(self, legs: Legs, hops: Ints) -> Legs:
        """Legs that would take over two circuits go on the rails of their servers on which it is fewest; those that
        no rail leads, from any to any."""
        rails = np.arange(self.servers.nics_per_server)
        legs = self._moved(legs, hops, LONGEST, rails, rails)
        return self._moved(legs, hops, NO_WAY - 1, np.repeat(rails, len(rails)), np.tile(rails, len(rails)))

    def _moved(self, legs: Legs, hops: Ints, most: int, out: Ints, into: Ints) -> Legs:
        """Legs of over `most` circuits, spread over all [choice] with fewest; over NVLink at both ends."""
        tor_of, works, own_rails = self._tor_of, self._hosts.nic_works, self.servers.nics_per_server
        own = np.where(legs.src_nic == NO_NIC, 0, hops[tor_of[legs.src_nic], tor_of[legs.dst_nic]])
        far = np.flatnonzero(own > most)
        if not len(far):
            return legs
        start = (legs.src_nic[far] - legs.src_nic[far] % own_rails)[:, None] + out
        end = (legs.dst_nic[far] - legs.dst_nic[far] % own_rails)[:, None] + into
        apart = np.where(works[start] & works[end], hops[tor_of[start], tor_of[end]], NO_WAY)
        fewest = apart.min(axis=1)
        chosen = (apart == fewest[:, None]) & (fewest < own[far])[:, None]
        counts = np.ones(len(legs), np.int64)
        counts[far] = np.maximum(1, chosen.sum(axis=1))
        leg = np.repeat(np.arange(len(legs)), counts)
        moved = np.isin(leg, far[chosen.any(axis=1)])
        src_nic, dst_nic = legs.src_nic[leg], legs.dst_nic[leg]
        src_nic[moved], dst_nic[moved] = start[chosen], end[chosen]
        share = legs.share[leg] / counts[leg]
        return Legs(legs.flow[leg], share, legs.src[leg], legs.dst[leg], src_nic, dst_nic)


def _anywhere(intent: Intent) -> Template:
    """Of PoDs without roles: all may be touched and joined; ports that are left over as at its stage."""
    spare = Spare.KEEP if intent.stage is Stage.WEIGHT_SYNC else Spare.SPREAD
    return Template(intent.period, Announced.of(intent), _EITHER, _ANY_TWO, spare, bipartite=False)


def _some(ends: Sequence[tuple[OcsId, int]], share: float) -> list[tuple[OcsId, int]]:
    """So many of them, evenly over the switches that they are on."""
    count = round(share * len(ends))
    return [ends[number * len(ends) // count] for number in range(count)]
