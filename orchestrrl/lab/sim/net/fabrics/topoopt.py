"""TopoOpt (Wang et al., NSDI 2023): NICs joined directly over patch panels, once for a job; hosts forward.

A NIC's two fibres are patched apart: what it sends goes to one server, what it receives comes from another. So NIC k of
all servers makes a permutation of them. The first `ring_nics` are rings at strides that lead everywhere in few hops, as
their AllReduce permutations; each other serves the most of the job's demand at once (an assignment), and what it serves
counts half for those that follow, as their matchings. They divide NICs by how much of the traffic is AllReduce, and
run it in the order of their rings; bytes from GPU to GPU do not tell it apart, and go in NCCL's order. So NICs are
divided as serves the demand best. Traffic takes as few hops as there are, spread over all such ways (they route MP
traffic over k shortest paths), and loads each link on the way. What forwarding takes of a host is not modelled but
for `FORWARD_S`.
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

FORWARD_S = 0.8e-6  # of a host that forwards: what a switch takes


def topoopt(
    servers: Servers, *, demand: InstanceOf[GpuFlows] | None = None, ring_nics: Count | None = None
) -> "TopoOpt":
    """`demand`: of the whole job, which the topology is for; None: rings alone. `ring_nics` None: as many as leave the
    fullest link the least to carry, two at least, so that a NIC may fail."""
    nics = servers.nics_per_server
    if ring_nics is not None and ring_nics > nics:
        refuse(ShapeFault("ring_nics", f"must be <= {nics}, the NICs of a server", ring_nics))
    if demand is not None and (most := int(max(demand.src.max(initial=0), demand.dst.max(initial=0)))) >= servers.gpus:
        refuse(ShapeFault("demand", f"GPUs are numbered 0 to {servers.gpus - 1}", most))
    sent = np.zeros((servers.count, servers.count)) if demand is None else server_demand(servers, demand)
    wanted = range(min(2, nics), nics + 1) if ring_nics is None and sent.any() else (ring_nics or nics,)
    found = [TopoOpt(servers, _permutations(sent, nics, rings)) for rings in wanted]
    return min(found, key=lambda each: each.strain(sent))


def server_demand(servers: Servers, flows: GpuFlows) -> Floats:
    """[server, server], bytes between two."""
    one, other = flows.src // servers.gpus_per_server, flows.dst // servers.gpus_per_server
    return sums_between(one, other, flows.bytes, servers.count)


def _permutations(demand: Floats, nics: int, rings: int) -> Ints:
    """[nic of a server, server], the server that it sends to."""
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
    """Of rings that come by every server, near the powers of one number: few hops to anywhere."""
    whole = [stride for stride in range(1, count) if gcd(stride, count) == 1] or [0]
    base = count ** (1 / rings)
    return [min(whole, key=lambda stride: (abs(stride - base**number), stride)) for number in range(rings)]


@dataclass(frozen=True, eq=False)
class TopoOpt(SimulatedFabric):
    """It is patched before the job begins. There are no ToRs or PoDs: shares of their uplinks say nothing here."""

    sends_to: Ints  # [nic of a server, server]
    name: str = field(default="topoopt", kw_only=True)

    @property
    def pods(self) -> Pods:
        """One: servers are as near as the patches make them."""
        return Pods(np.zeros(self.servers.count, np.int64), apart=False)

    def inventory(self) -> Inventory:
        """A NIC has one transceiver, and its pair of fibres ends in a port of a patch panel."""
        nics = self.servers.nics
        return Inventory(transceivers=nics, nics=nics, patch_panel_ports=nics, fibers=nics)

    @cached_property
    def joins(self) -> Ints:
        """[server, server], NICs of the first that send to one of the other."""
        servers = self.servers
        works = HostNetwork(servers, self.failed).nic_works.reshape(servers.count, -1)
        found = np.zeros((servers.count, servers.count), np.int64)
        for nic, ring in enumerate(self.sends_to):
            np.add.at(found, (np.arange(servers.count), ring), works[:, nic] & works[ring, nic])
        np.fill_diagonal(found, 0)
        return found

    def strain(self, demand: Floats) -> tuple[float, float]:
        """Bytes over each NIC of the fullest link, to a thousandth, and over all NICs; `demand` [server, server]."""
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
