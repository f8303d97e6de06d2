"""Model MixNet (Liao et al., SIGCOMM 2025). Most NICs of each server connect to the optical switch of a region of
servers, which is reconfigured for each period. The other NICs are on a non-blocking fat tree of packet switches.

Circuits follow the demand inside a region: circuits are assigned one at a time, each to the pair of servers whose
traffic would currently take longest. Traffic between two servers that share a circuit uses the circuit, and reaches it
over NVLink from any GPU. All other traffic uses the tree. As for RFabric, a reconfiguration takes only the optical
switch's own delay. It does not include the seconds that MixNet's authors measured until NICs were usable again.

The OrchestrRL paper does not state the size of a region. MixNet's authors choose a region that contains one group of
experts. In their simulator (mixnet-htsim, datacenter/mixnet.cpp), a region's number of GPUs is the EP degree times the
TP degree of a job. A job of several stages, some of them dense, has no such size. Regions in this model are as large as
the PoDs of the trees. Such a region is large enough for each group of the paper's appendix C (16 GPUs) and for each
engine (40 GPUs), and takes a third of the ports of the optical switch in section 7.2. Larger regions would keep more of
the gradients' traffic on circuits.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import Count, Inventory, Period, Pods, Radix, SimulatedFabric, refuse
from orchestrrl.lab.sim.net.fabrics.circuits import CircuitLinks, Device
from orchestrrl.lab.sim.net.fabrics.clos import RADIX, SERVERS_PER_POD, ClosCabling, blocked_tree, lay_tree
from orchestrrl.lab.sim.net.fabrics.hosts import HostNetwork, Legs, LinkRows, Wiring
from orchestrrl.lab.sim.net.fabrics.topoopt import server_demand
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, Ints, LinkNetwork, Servers
from planner.fabric.allocate import AllocationProblem, allocate
from planner.fabric.generate import ShapeFault
from planner.fabric.model import EndpointId
from planner.fabric.topology import DEVICES

SERVERS_PER_REGION = SERVERS_PER_POD


def mixnet(
    servers: Servers,
    *,
    eps_nics: Count = 2,
    servers_per_region: Count = SERVERS_PER_REGION,
    device: Device = "piezo_polatis",
    radix: Radix = RADIX,
    servers_per_pod: Count = SERVERS_PER_POD,
    servers_per_tor: Count | None = None,
) -> "MixNet":
    """Build a MixNet with `eps_nics` NICs of each server on the tree, and the server's other NICs at the OCS of its
    region. Raises ImpossibleSite if a server has too few NICs, or a switch has too few ports."""
    if eps_nics >= servers.nics_per_server:
        refuse(ShapeFault("eps_nics", f"must be < {servers.nics_per_server}, the NICs of a server", eps_nics))
    optical = servers.nics_per_server - eps_nics
    ports = DEVICES[device].ports
    if servers_per_region * optical > ports:
        message = f"must be smaller: with {optical} NICs per server, it exceeds the {ports} ports of {device}"
        refuse(ShapeFault("servers_per_region", message, servers_per_region))
    on_tree = replace(servers, gpus_per_server=eps_nics, nics_per_server=eps_nics)
    tree = blocked_tree(on_tree, radix, servers_per_pod, servers_per_tor)
    tor_of = np.full((servers.count, servers.nics_per_server), -1)
    tor_of[:, optical:] = tree.tor_of.reshape(servers.count, eps_nics)
    return MixNet(servers, replace(tree, tor_of=tor_of.ravel()), optical, servers_per_region, device)


@dataclass(frozen=True, eq=False)
class MixNet(SimulatedFabric):
    tree: ClosCabling
    optical: int  # NICs of a server at its region's OCS: the first ones
    servers_per_region: int
    device: str
    name: str = field(default="mixnet", kw_only=True)

    @property
    def reconfigures_s(self) -> float:
        return DEVICES[self.device].reconfiguration_s

    @property
    def pods(self) -> Pods:
        """The regions of servers, as PoDs. Traffic between regions can use only the NICs on the tree."""
        return Pods(np.arange(self.servers.count) // self.servers_per_region, apart=True)

    def inventory(self) -> Inventory:
        """Return the number of components of each type. A NIC at an OCS has one transceiver, one fibre and one OCS
        port."""
        optical = self.servers.count * self.optical
        return self.tree.inventory() + Inventory(
            transceivers=optical, nics=self.servers.nics, ocs_ports=optical, fibers=optical
        )

    def circuits(self, period: Period | None) -> Ints:
        """Return the number of circuits between any two servers, as an array indexed by [server, server]. If `period`
        is None, circuits are spread evenly over all pairs of servers of a region."""
        return np.frombuffer(self.circuits_of(period), np.int64).reshape(self.servers.count, -1)

    def _circuits_for(self, period: Period | None) -> bytes:
        servers = self.servers
        demand = np.ones((servers.count,) * 2) if period is None else server_demand(servers, period.demand)
        works = self._hosts.nic_works.reshape(servers.count, -1)[:, : self.optical].sum(axis=1)
        circuits = np.zeros((servers.count, servers.count), np.int64)
        for first in range(0, servers.count, self.servers_per_region):
            inside = range(first, min(first + self.servers_per_region, servers.count))
            ids = {server: EndpointId(f"{server:08}") for server in inside}
            problem = AllocationProblem(
                servers.nic_gbps,
                {ids[server]: int(works[server]) for server in inside},
                {
                    (ids[one], ids[other]): float(demand[one, other])
                    for one in inside
                    for other in inside
                    if one != other and demand[one, other] > 0
                },
            )
            for (one_id, other_id), count in allocate(problem).circuits.items():
                circuits[int(one_id), int(other_id)] = circuits[int(other_id), int(one_id)] = count
        return circuits.tobytes()

    @cached_property
    def _hosts(self) -> HostNetwork:
        """The part of the network inside servers. GPUs of a server share its NICs on the tree evenly, in the order of
        GPUs."""
        gpus, tree_nics = self.servers.gpus_per_server, self.servers.nics_per_server - self.optical
        place = tuple(self.optical + gpu * tree_nics // gpus for gpu in range(gpus))
        return HostNetwork(self.servers, self.failed, place=place)

    def _network(self, circuits: bytes) -> LinkNetwork:
        servers, hosts, wiring = self.servers, self._hosts, Wiring()
        joined = np.frombuffer(circuits, np.int64).reshape(servers.count, -1)
        server_nodes = servers.nics + np.arange(servers.nics) // servers.nics_per_server
        ports = np.where(self.tree.tor_of < 0, server_nodes, hosts.nodes + self.tree.tor_of)
        first_up = hosts.lay(wiring, ports)
        over_tree = lay_tree(self.tree, servers, self.failed, wiring, hosts.nodes)
        links = CircuitLinks.between_servers(wiring, joined, servers)

        def router(src: Ints, dst: Ints) -> FlowRoutes:
            hosts.check(src, dst)
            joins = joined[hosts.server_of(src), hosts.server_of(dst)] > 0

            def direct(rows: LinkRows, legs: Legs, some: Ints) -> Floats:
                return links.add(rows, some, hosts.server_of(legs.src[some]), hosts.server_of(legs.dst[some]), 0.0)

            return hosts.routes(hosts.legs(src, dst, direct=joins), first_up, over_tree, direct)

        return wiring.network(servers, router, self.name)
