"""Model TopoOpt (Wang et al., NSDI 2023). Patch panels connect NICs directly to each other, once per job, and hosts
forward traffic.

The two fibres of a NIC are patched separately: a NIC may send to one server and receive from another. The links of NIC
k of all servers therefore form a permutation of the servers. The first `ring_nics` NICs form rings whose strides reach
every server in few hops, as TopoOpt's AllReduce permutations do. Each further NIC is assigned to serve the most
remaining demand, and served demand counts half for the NICs after it, as in TopoOpt's matchings.

TopoOpt divides NICs between rings and matchings by the fraction of AllReduce traffic, and runs AllReduce in the order
of its rings. In this model, AllReduce follows NCCL's order and is not distinguished from other traffic. NICs are
divided so that the demand is served best. Traffic uses all paths with the fewest hops (TopoOpt routes MP traffic over k
shortest paths) and loads each link of a path. The only modelled cost of forwarding on a host is `FORWARD_S`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

import numpy as np
from pydantic import InstanceOf
from scipy.optimize import linear_sum_assignment

from orchestrrl.lab.sim.net.fabrics.base import Count, Inventory, Pods, SimulatedFabric, refuse
from orchestrrl.lab.sim.net.fabrics.circuits import CircuitLinks, DirectedLinks
from orchestrrl.lab.sim.net.fabrics.circuits import ways as shortest_ways
from orchestrrl.lab.sim.net.fabrics.hosts import HostNetwork, Legs, LinkRows, Wiring, sums_between
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, Ints, LinkNetwork, Servers
from planner.fabric.generate import ShapeFault

FORWARD_S = 0.8e-6  # latency of a host that forwards, equal to a switch's


def topoopt(
    servers: Servers, *, demand: InstanceOf[GpuFlows] | None = None, ring_nics: Count | None = None
) -> "TopoOpt":
    """Build a TopoOpt fabric for the `demand` of the whole job. Without a demand, the fabric has rings only. If
    `ring_nics` is None, the number of ring NICs that minimises the load of the busiest link is used. This number is at
    least 2 if a server has several NICs, so that servers stay connected if a NIC fails."""
    nics = servers.nics_per_server
    if ring_nics is not None and ring_nics > nics:
        refuse(ShapeFault("ring_nics", f"must be <= {nics}, the NICs of a server", ring_nics))
    if demand is not None and (most := int(max(demand.src.max(initial=0), demand.dst.max(initial=0)))) >= servers.gpus:
        refuse(ShapeFault("demand", f"GPUs must be in 0..{servers.gpus - 1}", most))
    sent = np.zeros((servers.count, servers.count)) if demand is None else server_demand(servers, demand)
    wanted = range(min(2, nics), nics + 1) if ring_nics is None and sent.any() else (ring_nics or nics,)
    found = [TopoOpt(servers, _permutations(sent, nics, rings)) for rings in wanted]
    return min(found, key=lambda each: each.strain(sent))


def server_demand(servers: Servers, flows: GpuFlows) -> Floats:
    """Return the number of bytes from one server to another, as an array indexed by [server, server]."""
    one, other = flows.src // servers.gpus_per_server, flows.dst // servers.gpus_per_server
    return sums_between(one, other, flows.bytes, servers.count)


def _permutations(demand: Floats, nics: int, rings: int) -> Ints:
    """Return the server to which each NIC sends, as an array indexed by [NIC of a server, server]."""
    count = len(demand)
    if not demand.any():
        rings = nics
    chosen = [(np.arange(count) + stride) % count for stride in _strides(count, rings)]
    left = demand.copy()
    for ring in chosen:
        left[np.arange(count), ring] /= 2
    while len(chosen) < nics:
        barred = np.where(np.eye(count, dtype=np.bool_), -1.0 - left.sum(), left)
        _, best = linear_sum_assignment(barred, maximize=True)
        chosen.append(np.asarray(best, np.int64))
        left[np.arange(count), best] /= 2
    return np.array(chosen, np.int64)


def _strides(count: int, rings: int) -> list[int]:
    """Return the strides of rings that visit every server. The strides are close to the powers of one number, so that
    every server is reached in few hops."""
    whole = [stride for stride in range(1, count) if gcd(stride, count) == 1] or [0]
    base = count ** (1 / rings)
    return [min(whole, key=lambda stride: (abs(stride - base**number), stride)) for number in range(rings)]


@dataclass(frozen=True, eq=False)
class TopoOpt(SimulatedFabric):
    """A TopoOpt fabric, patched before the job begins. Failures of ToR or PoD uplinks have no effect, because the
    fabric has no such uplinks."""

    sends_to: Ints  # [nic of a server, server]
    name: str = field(default="topoopt", kw_only=True)

    @property
    def pods(self) -> Pods:
        """One PoD with all servers, because patching alone determines the distance between servers."""
        return Pods(np.zeros(self.servers.count, np.int64), apart=False)

    def inventory(self) -> Inventory:
        """Return the number of components of each type. A NIC has one transceiver, and its pair of fibres ends at one
        patch panel port."""
        nics = self.servers.nics
        return Inventory(transceivers=nics, nics=nics, patch_panel_ports=nics, fibers=nics)

    @cached_property
    def joins(self) -> Ints:
        """The number of NICs of one server that send to NICs of another server, as an array indexed by [from, to]. Only
        working NICs are counted."""
        servers = self.servers
        works = HostNetwork(servers, self.failed).nic_works.reshape(servers.count, -1)
        found = np.zeros((servers.count, servers.count), np.int64)
        for nic, ring in enumerate(self.sends_to):
            np.add.at(found, (np.arange(servers.count), ring), works[:, nic] & works[ring, nic])
        np.fill_diagonal(found, 0)
        return found

    def strain(self, demand: Floats) -> tuple[float, float]:
        """Return the number of bytes per NIC on the busiest link, to four significant digits, and the total number of
        bytes over all NICs. `demand` is the number of bytes between servers, as an array indexed by [server, server].
        """
        edges = DirectedLinks.of(self.joins.astype(np.float64))
        one, other = np.nonzero(demand)
        owner, edge, share = shortest_ways(edges, one, other).rows(np.arange(len(one)))
        carried = np.bincount(edge, demand[one, other][owner] * share, minlength=len(edges.head))
        return float(f"{(carried / edges.width).max(initial=0.0):.3e}"), float(carried.sum())

    def _network(self, circuits: None) -> LinkNetwork:
        servers, hosts, wiring = self.servers, HostNetwork(self.servers, self.failed), Wiring()
        hosts.lay_nvlink(wiring)
        links = CircuitLinks.between_servers(wiring, self.joins, servers)

        def direct(rows: LinkRows, legs: Legs, some: Ints) -> Floats:
            one, other = hosts.server_of(legs.src[some]), hosts.server_of(legs.dst[some])
            forwarded = links.add(rows, some, one, other, FORWARD_S)
            return np.asarray(forwarded - np.where(one != other, FORWARD_S, 0.0))

        def router(src: Ints, dst: Ints) -> FlowRoutes:
            legs = hosts.legs(src, dst, direct=np.ones(len(src), np.bool_))
            return hosts.routes(legs, 0, lambda _rows, _legs, some: np.zeros(len(some)), direct)

        return wiring.network(servers, router, self.name)
