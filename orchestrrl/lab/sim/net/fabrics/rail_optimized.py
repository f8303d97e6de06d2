"""Rail-optimised fat tree: GPUs in one place of the servers of a PoD are on one ToR, above which it is a fat tree.

A message for a GPU in another place goes over NVLink to the GPU of that place first (`cross_rail: nvlink`, NCCL's PXN),
or up to the spine and down again (`spine`). `servers_per_tor`: at most so many have their NICs of a rail on one ToR;
None: as many as its ports take.
"""

import numpy as np

from orchestrrl.lab.sim.net.fabrics.clos import Clos, ClosCabling
from orchestrrl.lab.sim.net.fabrics.fat_tree import RADIX, SERVERS_PER_POD, tree_faults
from orchestrrl.lab.sim.net.fabrics.options import one_of, refuse
from orchestrrl.lab.sim.net.model import Servers
from planner.fabric.shape import ShapeFault


def rail_optimized(
    servers: Servers,
    *,
    radix: int = RADIX,
    servers_per_pod: int = SERVERS_PER_POD,
    servers_per_tor: int | None = None,
    cross_rail: str = "nvlink",
) -> Clos:
    refuse(
        *tree_faults(radix, servers_per_pod, servers_per_tor, None),
        *one_of("cross_rail", cross_rail, ("nvlink", "spine")),
    )
    down = radix // 2
    if servers_per_tor is not None and servers_per_tor > down:
        refuse(
            ShapeFault("servers_per_tor", f"a ToR of {radix} ports has {down} down, one for a server", servers_per_tor)
        )
    tree = _tree(servers, servers_per_tor or down, servers_per_pod)
    return Clos("rail_optimized", servers, tree, rails=cross_rail == "nvlink")


def _tree(servers: Servers, servers_per_tor: int, servers_per_pod: int) -> ClosCabling:
    """By PoD, block of servers and rail."""
    nic, rails = np.arange(servers.nics), servers.nics_per_server
    server, rail = np.divmod(nic, rails)
    blocks = -(-servers_per_pod // servers_per_tor)
    block = server // servers_per_pod * blocks + server % servers_per_pod * blocks // servers_per_pod
    used, tor = np.unique(block * rails + rail, return_inverse=True)
    return ClosCabling(tor, used // rails // blocks)
