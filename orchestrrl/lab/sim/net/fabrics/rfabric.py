"""Model RFabric (section 5 of the OrchestrRL paper): rail-aligned ToRs that switch packets, with optical switches above
the ToRs.

Circuits are those that the fabric's own planner materialises for a period's demand (planner/fabric/materialize.py). As
on a real site, the planner can use only existing ports and lanes, and reserves a slice of the core for responses.
Packets use the circuits between their two ToRs. If no circuit connects these ToRs, packets cross the fewest other ToRs,
or change rails (`Rails`). A period's circuits are planned starting from the circuits at rest, which connect all ToRs of
a rail evenly. In PoDs with fewer than three servers, ToRs have too few fibres to connect all ToRs to each other.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from orchestrrl.lab.sim.net.fabrics.base import Count, Inventory, Period, Pods, SimulatedFabric, refuse
from orchestrrl.lab.sim.net.fabrics.circuits import NO_WAY, CircuitLinks, Device, distances
from orchestrrl.lab.sim.net.fabrics.clos import SERVERS_PER_POD
from orchestrrl.lab.sim.net.fabrics.hosts import NO_NIC, HostNetwork, Legs, LinkRows, Wiring, sums_between
from orchestrrl.lab.sim.net.fabrics.rfabric_circuits import RFabricCircuits, evenly, fitted
from orchestrrl.lab.sim.net.model import Bools, Floats, FlowRoutes, GpuFlows, Ints, LinkNetwork, LinkTier, Servers
from planner.fabric.generate import ShapeFault, SiteShape, regular_site
from planner.fabric.intent import Stage
from planner.fabric.model import PortPair
from planner.fabric.topology import DEVICES, Site
from planner.fabric.topology import Tier as SiteTier

LONGEST = 2  # circuits of a path on the message's own rail


@dataclass(frozen=True, eq=False)
class Rails:
    """The rails of a fabric, and the choice of rails for messages. NICs at the same index of their servers form a
    rail."""

    rails: int
    tor_of: Ints  # [nic]
    works: Bools  # [nic]
    hops: Ints  # [tor, tor], circuits

    def lead(self, legs: Legs) -> Legs:
        """Move legs whose path has more than two circuits to the rails whose paths have the fewest circuits. Legs that
        no single rail connects may leave on one rail and arrive on another."""
        rails = np.arange(self.rails)
        legs = self._moved(legs, LONGEST, rails, rails)
        return self._moved(legs, NO_WAY - 1, np.repeat(rails, len(rails)), np.tile(rails, len(rails)))

    def _moved(self, legs: Legs, most: int, out: Ints, into: Ints) -> Legs:
        """Spread each leg whose path has more than `most` circuits over all choices of rails whose paths have the
        fewest circuits. `out` and `into`, indexed by choice, are the rails at the source and at the destination. GPUs
        reach these rails over NVLink."""
        tor_of, hops = self.tor_of, self.hops
        own = np.where(legs.src_nic == NO_NIC, 0, hops[tor_of[legs.src_nic], tor_of[legs.dst_nic]])
        far = np.flatnonzero(own > most)
        if not len(far):
            return legs
        start = (legs.src_nic[far] - legs.src_nic[far] % self.rails)[:, None] + out
        end = (legs.dst_nic[far] - legs.dst_nic[far] % self.rails)[:, None] + into
        apart = np.where(self.works[start] & self.works[end], hops[tor_of[start], tor_of[end]], NO_WAY)
        fewest = apart.min(axis=1)
        chosen = (apart == fewest[:, None]) & (fewest < own[far])[:, None]
        counts = np.ones(len(legs), np.int64)
        counts[far] = np.maximum(1, chosen.sum(axis=1))
        found, leg = legs.spread(counts)
        moved = np.isin(leg, far[chosen.any(axis=1)])
        found.src_nic[moved], found.dst_nic[moved] = start[chosen], end[chosen]
        return found


Allocation = Literal["traffic", "uniform", "fixed"]


def rfabric(
    servers: Servers,
    *,
    train_servers: Annotated[int, Field(ge=0)] | None = None,
    servers_per_pod: Count = SERVERS_PER_POD,
    servers_per_tor: Count | None = None,
    device: Device = "piezo_polatis",
    allocation: Allocation = "traffic",
) -> "RFabric":
    """Build an RFabric. The first `train_servers` servers are in Train PoDs, spread evenly over the fewest PoDs that
    have room. The other servers fill Gen PoDs one after another, so that only the last PoD may have free slots. Each
    stage changes the circuits of the PoDs that its template names. If `train_servers` is None, PoDs have no roles, and
    a period changes the circuits of the PoDs in which it has traffic.

    A full ToR has as many uplinks as NICs. A PoD has half as many lanes to the core as NICs.

    `allocation` determines the circuits. With `traffic`, circuits are allocated by the traffic of each period. With
    `uniform`, they are spread evenly over the ToR pairs that have traffic. With `fixed`, the circuits at rest are kept.
    """
    train = servers.count if train_servers is None else train_servers
    if train > servers.count:
        refuse(ShapeFault("train_servers", f"must be <= {servers.count}, the number of servers", train))
    parts = [count for count in (train, servers.count - train) if count]
    per_pod = max(-(-count // -(-count // servers_per_pod)) for count in parts)
    site = regular_site(
        SiteShape(
            train_pods=-(-train // per_pod),
            gen_pods=-(-(servers.count - train) // per_pod),
            servers_per_pod=per_pod,
            gpus_per_server=servers.gpus_per_server,
            nics_per_server=servers.nics_per_server,
            servers_per_tor=servers_per_tor,
            link_gbps=servers.nic_gbps,
            nic_gbps=servers.nic_gbps,
            agg_device=DEVICES[device],
            core_device=DEVICES[device],
        )
    )
    generating = -(-train // per_pod) * per_pod + np.arange(servers.count - train)
    place = np.concatenate([evenly(train, per_pod), generating])
    return RFabric(servers, fitted(site, place), place, train_servers is not None, allocation)


@dataclass(frozen=True, eq=False)
class RFabric(SimulatedFabric):
    site: Site
    place: Ints  # [server], its index in the site
    roles: bool
    allocation: Allocation = "traffic"
    name: str = field(default="rfabric", kw_only=True)

    @property
    def pods(self) -> Pods:
        per_pod = len(self.site.servers) // len(self.site.pods)
        return Pods(self.place // per_pod, apart=True)

    @property
    def reconfigures_s(self) -> float:
        used = (each for each in self.site.switches if any(each.ports.values()))
        return max((each.device.reconfiguration_s for each in used), default=0.0)

    def inventory(self) -> Inventory:
        """Return the number of components of each type. A NIC's link has a transceiver at both ends and a ToR port. A
        ToR's fibre has one transceiver, one ToR port and one OCS port. A lane to the core is a fibre between two OCS
        ports."""
        nics, lanes = self.servers.nics, len(self.site.lanes)
        up = sum(map(len, self.site.fibres[SiteTier.AGG].values())) - lanes
        return Inventory(
            transceivers=2 * nics + up,
            nics=nics,
            electrical_ports=nics + up,
            ocs_ports=up + 2 * lanes,
            fibers=nics + up + lanes,
        )

    def _circuits_for(self, period: Period | None) -> frozenset[PortPair]:
        if period is None or self.allocation == "fixed":
            return self.circuits.at_rest
        demand = self.tor_demand(period.demand)
        if self.allocation == "uniform":
            demand = np.where(demand > 0, 1.0, 0.0)
        return self.circuits.of_period(period.id, Stage(period.stage), demand)

    def tor_demand(self, flows: GpuFlows) -> Floats:
        """Return the number of bytes from one ToR to another, as an array indexed by [tor, tor]. Servers without a
        working NIC neither send nor receive bytes."""
        here, there = self._hosts.server_of(flows.src), self._hosts.server_of(flows.dst)
        reached: Bools = self._hosts.nic_works.reshape(self.servers.count, -1).sum(axis=1) > 0
        outside = (here != there) & reached[here] & reached[there]
        legs = self._hosts.legs(flows.src[outside], flows.dst[outside])
        one, other = self._tor_of[legs.src_nic], self._tor_of[legs.dst_nic]
        return sums_between(one, other, flows.bytes[outside][legs.flow] * legs.share, len(self.site.tors))

    @cached_property
    def circuits(self) -> RFabricCircuits:
        blocks = np.unique(self._tor_of.reshape(self.servers.count, -1), axis=0)
        return RFabricCircuits(self.site, self.roles, blocks, self.failed)

    @cached_property
    def _hosts(self) -> HostNetwork:
        return HostNetwork(self.servers, self.failed, rails=True)

    @cached_property
    def _tor_of(self) -> Ints:
        """The ToR of each NIC, as an array indexed by NIC."""
        number = {tor.id: place for place, tor in enumerate(self.site.tors)}
        rows = [[number[tor] for tor in self.site.servers[place].tors] for place in self.place.tolist()]
        return np.array(rows, np.int64).ravel()

    def _network(self, circuits: frozenset[PortPair]) -> LinkNetwork:
        servers, hosts, tor_of = self.servers, self._hosts, self._tor_of
        wiring = Wiring()
        first_up = hosts.lay(wiring, hosts.nodes + tor_of)
        pod_of = self.circuits.pod_of
        apart = pod_of[:, None] != pod_of[None, :]
        links = CircuitLinks.lay(
            wiring,
            np.asarray(self.circuits.between_tors(circuits) * servers.nic_bytes_per_s, np.float64),
            np.where(apart, LinkTier.CORE, LinkTier.AGG),
            np.where(apart, 4, 2) * servers.propagation_s,
            hosts.nodes,
        )
        rails = Rails(servers.nics_per_server, tor_of, hosts.nic_works, distances(links.edges))

        def between(rows: LinkRows, legs: Legs, some: Ints) -> Floats:
            one, other = tor_of[legs.src_nic[some]], tor_of[legs.dst_nic[some]]
            return servers.processing_s + links.add(rows, some, one, other, servers.processing_s)

        def router(src: Ints, dst: Ints) -> FlowRoutes:
            return hosts.routes(rails.lead(hosts.legs(src, dst)), first_up, between)

        return wiring.network(servers, router, self.name)
