"""Trees of packet switches: NICs below ToRs, ToRs below the switches of their PoD, those below the core.

Packets are sprayed over all paths up, so that the switches of a PoD are one node, and those of the core another; what
joins a ToR to its PoD, and a PoD to the core, is one bundle each way.

`fat_tree`: non-blocking, three tiers of equal switches (Al-Fares et al., SIGCOMM 2008). All NICs of a server are on one
ToR, half of whose ports go down. PoDs have as many servers as a scalable unit of NVIDIA's DGX SuperPOD: 32. How many
those are changes latency alone. `servers_per_tor`: at most so many; None: as many as its ports take. There are three
tiers, as the ToR-Agg-Core of the OrchestrRL paper's table 1.

`oversubscribed`: `ratio` times as many ports of a ToR go down as up; above the ToRs nothing blocks. 3:1 as FT-OS in
section 7.2 of the OrchestrRL paper, which does not say where: it is the ToRs' uplinks where it saves most.

`rail_optimized`: GPUs in one place of the servers of a PoD are on one ToR, above which it is a fat tree. A message for
a GPU in another place goes over NVLink to the GPU of that place first (NCCL's PXN).
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
    """Where NICs are cabled to. `tor_ratio`: what a ToR's NICs can send over what its uplinks carry; 1: non-blocking.
    The core is as wide as what the ToRs have below it. Uplinks are whole: a ratio that does not come out is a little
    better than said."""

    tor_of: Ints  # [nic]; -1: it is not of this tree
    pod_of: Ints  # [tor]
    tor_ratio: float = 1.0

    @cached_property
    def nics(self) -> Ints:
        """[tor]"""
        return np.bincount(self.tor_of[self.tor_of >= 0], minlength=len(self.pod_of))

    @property
    def pods(self) -> int:
        return int(self.pod_of.max(initial=-1)) + 1

    @cached_property
    def tor_uplinks(self) -> Ints:
        """[tor], links of a NIC's rate. A ToR alone has none."""
        wanted = np.ceil(self.nics / self.tor_ratio - 1e-9).astype(np.int64)
        return wanted if len(self.pod_of) > 1 else np.zeros_like(wanted)

    @cached_property
    def pod_uplinks(self) -> Ints:
        """[pod], as many as its ToRs have. A PoD alone has none."""
        wanted = np.bincount(self.pod_of, self.tor_uplinks, minlength=self.pods).astype(np.int64)
        return wanted if self.pods > 1 else np.zeros_like(wanted)

    def inventory(self) -> Inventory:
        """Each link is a fibre with a transceiver at either end; those of NICs end at one port, others at two. Without
        the NICs themselves."""
        access, uplinks = int(self.nics.sum()), int(self.tor_uplinks.sum() + self.pod_uplinks.sum())
        return Inventory(
            transceivers=2 * (access + uplinks), electrical_ports=access + 2 * uplinks, fibers=access + uplinks
        )


def lay_tree(
    tree: ClosCabling, servers: Servers, failed: SimulatedFailures, wiring: Wiring, first_node: int
) -> Between:
    """Lay the bundles of a tree, and return what leads from ToR to ToR. ToRs are nodes from `first_node` on, then PoDs,
    then the core."""
    tors, pods = first_node + np.arange(len(tree.pod_of)), first_node + len(tree.pod_of) + np.arange(tree.pods)
    core = first_node + len(tors) + len(pods)
    of_tor = tree.tor_uplinks * servers.nic_bytes_per_s * left(failed.tor_uplinks, len(tors))
    of_pod = tree.pod_uplinks * servers.nic_bytes_per_s * left(failed.pod_uplinks, tree.pods)
    tor_up = wiring.lay(LinkTier.AGG, of_tor, tors, pods[tree.pod_of])
    tor_down = wiring.lay(LinkTier.AGG, of_tor, pods[tree.pod_of], tors)
    pod_up = wiring.lay(LinkTier.CORE, of_pod, pods, core)
    pod_down = wiring.lay(LinkTier.CORE, of_pod, core, pods)

    def between(rows: LinkRows, legs: Legs, some: Ints) -> Floats:
        """The seconds are of switches, and of the links beside those of NICs."""
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
    """A fabric that is one tree, and never changes."""

    tree: ClosCabling
    rails: bool = False  # see HostNetwork

    @property
    def pods(self) -> Pods:
        """The core is as wide as what leaves the ToRs."""
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


RADIX = 64  # ports of a switch: all that the prices of the paper's table 4 are of have 64
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
    """Servers in blocks below ToRs, `ratio` times as many ports down as up. Raises Impossible."""
    down = int(radix * ratio / (1 + ratio) + 1e-9)
    refuse(*_too_many(servers, radix, down, servers_per_tor))
    return _cabled(servers, servers_per_tor or down // servers.nics_per_server, servers_per_pod, 1, ratio)


def _too_many(servers: Servers, radix: int, down: int, servers_per_tor: int | None) -> Iterator[ShapeFault]:
    nics = servers.nics_per_server
    if down < nics:
        yield ShapeFault("radix", f"a ToR must have ports for the {nics} NICs of a server", radix)
    elif servers_per_tor is not None and servers_per_tor * nics > down:
        message = f"a ToR of {radix} ports has {down} down, for {down // nics} servers of {nics} NICs"
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
        refuse(
            ShapeFault("servers_per_tor", f"a ToR of {radix} ports has {down} down, one for a server", servers_per_tor)
        )
    tree = _cabled(servers, servers_per_tor or down, servers_per_pod, servers.nics_per_server)
    return Clos(servers, tree, rails=True, name="rail_optimized")


def _cabled(
    servers: Servers, servers_per_tor: int, servers_per_pod: int, rails: int, ratio: float = 1.0
) -> ClosCabling:
    """ToRs by PoD, block of servers and rail."""
    server, place = np.divmod(np.arange(servers.nics), servers.nics_per_server)
    blocks = -(-servers_per_pod // servers_per_tor)
    block = server // servers_per_pod * blocks + server % servers_per_pod * blocks // servers_per_pod
    used, tor = np.unique(block * rails + place % rails, return_inverse=True)
    return ClosCabling(tor, used // rails // blocks, ratio)
