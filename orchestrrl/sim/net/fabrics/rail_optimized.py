"""Rail-optimised fat tree: GPUs in one place of the servers of a PoD are on one ToR, above which it is a fat tree.

A message for a GPU in another place goes over NVLink to the GPU of that place first (`cross_rail: nvlink`, NCCL's PXN),
or up to the spine and down again (`spine`).
"""

import numpy as np

from orchestrrl.sim.net.fabrics.clos import Clos, Tree
from orchestrrl.sim.net.fabrics.fat_tree import RADIX, SERVERS_PER_POD
from orchestrrl.sim.net.fabrics.options import at_least, one_of, refuse
from orchestrrl.sim.net.model import Servers


def rail_optimized(
    servers: Servers,
    *,
    radix: int = RADIX,
    servers_per_pod: int = SERVERS_PER_POD,
    cross_rail: str = "nvlink",
) -> Clos:
    refuse(
        *at_least("radix", radix, 2),
        *at_least("servers_per_pod", servers_per_pod, 1),
        *one_of("cross_rail", cross_rail, ("nvlink", "spine")),
    )
    return Clos("rail_optimized", servers, _tree(servers, radix // 2, servers_per_pod), rails=cross_rail == "nvlink")


def _tree(servers: Servers, down: int, servers_per_pod: int) -> Tree:
    """By PoD, block of servers and rail."""
    nic, rails = np.arange(servers.nics), servers.nics_per_server
    server, rail = np.divmod(nic, rails)
    blocks = -(-servers_per_pod // down)
    block = server // servers_per_pod * blocks + server % servers_per_pod * blocks // servers_per_pod
    used, tor = np.unique(block * rails + rail, return_inverse=True)
    return Tree(tor, used // rails // blocks)
