"""Build trees of packet switches: NICs below ToRs, ToRs below the switches of their PoD, PoDs below the core.

Packets are sprayed over all upward paths, so that the switches of a PoD are modelled as one node, and the core switches
as another node. One bundle per direction connects each ToR to its PoD, and one bundle per direction connects each PoD
to the core.

`fat_tree` builds a non-blocking tree with three tiers of equal switches (Al-Fares et al., SIGCOMM 2008), like the
ToR-Agg-Core network in table 1 of the OrchestrRL paper. All NICs of a server are on one ToR. Half of a ToR's ports lead
down to NICs. A PoD has 32 servers, like a scalable unit of NVIDIA's DGX SuperPOD. This number affects only latency.
`servers_per_tor` limits the number of servers below a ToR. If it is None, only the ToR's ports limit this number.

`oversubscribed` builds a tree whose ToRs have `ratio` times as many ports downwards as upwards. The tiers above the
ToRs are non-blocking. A ratio of 3:1 is FT-OS in section 7.2 of the OrchestrRL paper. The paper does not name the
oversubscribed tier. This model oversubscribes the ToRs' uplinks, because this saves the most components.

`rail_optimized` builds a fat tree in which GPUs at the same index of the servers of a PoD share a ToR. A message for a
GPU at another index first goes over NVLink to the GPU at that index in the sender's server (NCCL's PXN).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import Field

from orchestrrl.lab.sim.net.fabrics.base import (
    Count,
    Inventory,
    Pods,
    Radix,
    SimulatedFabric,
    SimulatedFailures,
    refuse,
)
from orchestrrl.lab.sim.net.fabrics.hosts import Between, HostNetwork, Legs, LinkRows, Wiring, left
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, Ints, LinkNetwork, LinkTier, Servers
from planner.fabric.generate import ShapeFault


@dataclass(frozen=True, eq=False)
class ClosCabling:
    """The cabling of a tree of packet switches. `tor_ratio` is the bandwidth of a ToR's NICs divided by that of its
    uplinks; a ratio of 1 is non-blocking. The core is as wide as the ToRs' uplinks. The number of uplinks is rounded
    up, so that the actual ratio may be slightly lower."""

    tor_of: Ints  # [nic]; -1: not part of this tree
    pod_of: Ints  # [tor]
    tor_ratio: float = 1.0

    @cached_property
    def nics(self) -> Ints:
        """The number of NICs below each ToR, as an array indexed by ToR."""
        return np.bincount(self.tor_of[self.tor_of >= 0], minlength=len(self.pod_of))

    @property
    def pods(self) -> int:
        return int(self.pod_of.max(initial=-1)) + 1

    @cached_property
    def tor_uplinks(self) -> Ints:
        """The number of uplinks of each ToR, as an array indexed by ToR. A single ToR has no uplinks. An uplink has the
        rate of a NIC."""
        wanted = np.ceil(self.nics / self.tor_ratio - 1e-9).astype(np.int64)
        return wanted if len(self.pod_of) > 1 else np.zeros_like(wanted)

    @cached_property
    def pod_uplinks(self) -> Ints:
        """The number of uplinks of each PoD, as an array indexed by PoD. It equals the number of uplinks of the PoD's
        ToRs. A single PoD has no uplinks."""
        wanted = np.bincount(self.pod_of, self.tor_uplinks, minlength=self.pods).astype(np.int64)
        return wanted if self.pods > 1 else np.zeros_like(wanted)

    def inventory(self) -> Inventory:
        """Return the tree's components without the NICs. Each link is a fibre with a transceiver at both ends. A NIC's
        link uses one switch port; any other link uses two."""
        access, uplinks = int(self.nics.sum()), int(self.tor_uplinks.sum() + self.pod_uplinks.sum())
        return Inventory(
            transceivers=2 * (access + uplinks), electrical_ports=access + 2 * uplinks, fibers=access + uplinks
        )


def lay_tree(
    tree: ClosCabling, servers: Servers, failed: SimulatedFailures, wiring: Wiring, first_node: int
) -> Between:
    """Add the bundles of links of a tree to `wiring`, and return the function that routes legs between ToRs. Nodes are
    numbered from `first_node`: ToRs, then PoDs, then the core."""
    tors, pods = first_node + np.arange(len(tree.pod_of)), first_node + len(tree.pod_of) + np.arange(tree.pods)
    core = first_node + len(tors) + len(pods)
    of_tor = tree.tor_uplinks * servers.nic_bytes_per_s * left(failed.tor_uplinks, len(tors))
    of_pod = tree.pod_uplinks * servers.nic_bytes_per_s * left(failed.pod_uplinks, tree.pods)
    tor_up = wiring.lay(LinkTier.AGG, of_tor, tors, pods[tree.pod_of])
    tor_down = wiring.lay(LinkTier.AGG, of_tor, pods[tree.pod_of], tors)
    pod_up = wiring.lay(LinkTier.CORE, of_pod, pods, core)
    pod_down = wiring.lay(LinkTier.CORE, of_pod, core, pods)

    def between(rows: LinkRows, legs: Legs, some: Ints) -> Floats:
        """Add the links between the ToRs of the legs `some` to `rows`. Return the latency of each of these legs in
        seconds, without the latency of the NICs' links."""
        one, other = tree.tor_of[legs.src_nic[some]], tree.tor_of[legs.dst_nic[some]]
        here, there = tree.pod_of[one], tree.pod_of[other]
        apart, far = one != other, here != there
        rows.add(some[apart], tor_up + one[apart])
        rows.add(some[far], pod_up + here[far])
        rows.add(some[far], pod_down + there[far])
        rows.add(some[apart], tor_down + other[apart])
        higher = apart.astype(np.int64) + far
        return np.asarray(higher * 2 * servers.propagation_s + (1 + 2 * higher) * servers.processing_s, np.float64)

    return between


@dataclass(frozen=True, eq=False)
class Clos(SimulatedFabric):
    """A fabric that consists of one static tree of packet switches."""

    tree: ClosCabling
    rails: bool = False  # see HostNetwork

    @property
    def pods(self) -> Pods:
        """The PoDs of the tree. Bandwidth between PoDs is not lower than inside a PoD, because the core is as wide as
        the ToRs' uplinks."""
        first = self.tree.tor_of[:: self.servers.nics_per_server]
        return Pods(self.tree.pod_of[first], apart=False)

    def inventory(self) -> Inventory:
        return self.tree.inventory() + Inventory(nics=self.servers.nics)

    def _network(self, circuits: None) -> LinkNetwork:
        hosts = HostNetwork(self.servers, self.failed, self.rails)
        wiring = Wiring()
        first_up = hosts.lay(wiring, hosts.nodes + self.tree.tor_of)
        between = lay_tree(self.tree, self.servers, self.failed, wiring, hosts.nodes)

        def router(src: Ints, dst: Ints) -> FlowRoutes:
            return hosts.routes(hosts.legs(src, dst), first_up, between)

        return wiring.network(self.servers, router, self.name)


RADIX = 64  # ports of a switch: those priced in the paper's table 4 all have 64
SERVERS_PER_POD = 32


def fat_tree(
    servers: Servers,
    *,
    radix: Radix = RADIX,
    servers_per_pod: Count = SERVERS_PER_POD,
    servers_per_tor: Count | None = None,
) -> Clos:
    return Clos(servers, blocked_tree(servers, radix, servers_per_pod, servers_per_tor), name="fat_tree")


def blocked_tree(
    servers: Servers, radix: int, servers_per_pod: int, servers_per_tor: int | None, ratio: float = 1.0
) -> ClosCabling:
    """Return the cabling of a tree in which each ToR connects a block of `servers_per_tor` servers, or as many servers
    as its ports allow if this is None. `ratio` is a ToR's number of ports down divided by its number of ports up.
    Raises ImpossibleSite if the switches have too few ports for the servers."""
    down = int(radix * ratio / (1 + ratio) + 1e-9)
    refuse(*_too_many(servers, radix, down, servers_per_tor))
    return _cabled(servers, servers_per_tor or down // servers.nics_per_server, servers_per_pod, 1, ratio)


def _too_many(servers: Servers, radix: int, down: int, servers_per_tor: int | None) -> Iterator[ShapeFault]:
    nics = servers.nics_per_server
    if down < nics:
        yield ShapeFault("radix", f"must leave a ToR ports for the {nics} NICs of a server", radix)
    elif servers_per_tor is not None and servers_per_tor * nics > down:
        message = f"must be <= {down // nics}: a ToR of {radix} ports has {down} downwards, a server {nics} NICs"
        yield ShapeFault("servers_per_tor", message, servers_per_tor)


def oversubscribed(
    servers: Servers,
    *,
    ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 3.0,
    radix: Radix = RADIX,
    servers_per_pod: Count = SERVERS_PER_POD,
    servers_per_tor: Count | None = None,
) -> Clos:
    tree = blocked_tree(servers, radix, servers_per_pod, servers_per_tor, ratio)
    return Clos(servers, tree, name="oversubscribed")


def rail_optimized(
    servers: Servers,
    *,
    radix: Radix = RADIX,
    servers_per_pod: Count = SERVERS_PER_POD,
    servers_per_tor: Count | None = None,
) -> Clos:
    down = radix // 2
    if servers_per_tor is not None and servers_per_tor > down:
        refuse(ShapeFault("servers_per_tor", f"must be <= {down}, half of the {radix} ports of a ToR", servers_per_tor))
    tree = _cabled(servers, servers_per_tor or down, servers_per_pod, servers.nics_per_server)
    return Clos(servers, tree, rails=True, name="rail_optimized")


def _cabled(
    servers: Servers, servers_per_tor: int, servers_per_pod: int, rails: int, ratio: float = 1.0
) -> ClosCabling:
    """Return the cabling of a tree with one ToR for each rail of each block of servers. The servers of a block are in
    one PoD."""
    server, place = np.divmod(np.arange(servers.nics), servers.nics_per_server)
    blocks = -(-servers_per_pod // servers_per_tor)
    block = server // servers_per_pod * blocks + server % servers_per_pod * blocks // servers_per_pod
    used, tor = np.unique(block * rails + place % rails, return_inverse=True)
    return ClosCabling(tor, used // rails // blocks, ratio)
