"""Oversubscribed fat tree: `ratio` times as many ports of a ToR go down as up; above the ToRs nothing blocks. 3:1 as
FT-OS in section 7.2 of the OrchestrRL paper, which does not say where: it is the ToRs' uplinks where it saves most."""

from orchestrrl.lab.sim.net.fabrics.clos import Clos
from orchestrrl.lab.sim.net.fabrics.fat_tree import RADIX, SERVERS_PER_POD, blocked_tree
from orchestrrl.lab.sim.net.model import Servers


def oversubscribed(
    servers: Servers,
    *,
    ratio: float = 3.0,
    radix: int = RADIX,
    servers_per_pod: int = SERVERS_PER_POD,
    servers_per_tor: int | None = None,
    tiers: int | None = 3,
) -> Clos:
    tree = blocked_tree(servers, radix, servers_per_pod, servers_per_tor, tiers, ratio)
    return Clos("oversubscribed", servers, tree)
