"""Fat tree: non-blocking, three tiers of equal packet switches (Al-Fares et al., SIGCOMM 2008).

All NICs of a server are on one ToR, half of whose ports go down. PoDs have as many servers as a scalable unit of
NVIDIA's DGX SuperPOD: 32. How many those are changes latency alone. `servers_per_tor`: at most so many; None: as many
as its ports take. `tiers`: 3, as the ToR-Agg-Core of the OrchestrRL paper's table 1; 2 where ToRs are joined directly
by one stage of spines, which reaches radix^2 / 2 NICs where ToRs are full; None: as few as the radix allows.
"""

from collections.abc import Iterator

import numpy as np

from orchestrrl.lab.sim.net.fabrics.clos import Clos, ClosCabling
from orchestrrl.lab.sim.net.fabrics.options import at_least, number, refuse
from orchestrrl.lab.sim.net.model import Ints, Servers
from planner.fabric.shape import ShapeFault

RADIX = 64  # ports of a switch: all that the prices of the paper's table 4 are of have 64
SERVERS_PER_POD = 32


def fat_tree(
    servers: Servers,
    *,
    radix: int = RADIX,
    servers_per_pod: int = SERVERS_PER_POD,
    servers_per_tor: int | None = None,
    tiers: int | None = 3,
) -> Clos:
    return Clos("fat_tree", servers, blocked_tree(servers, radix, servers_per_pod, servers_per_tor, tiers))


def blocked_tree(
    servers: Servers,
    radix: int,
    servers_per_pod: int,
    servers_per_tor: int | None,
    tiers: int | None,
    ratio: float = 1.0,
) -> ClosCabling:
    """Servers in blocks below ToRs, `ratio` times as many ports down as up. Raises Impossible."""
    nics = servers.nics_per_server
    refuse(*tree_faults(radix, servers_per_pod, servers_per_tor, tiers), *number("ratio", ratio, 1.0))
    down = int(radix * ratio / (1 + ratio) + 1e-9)
    refuse(*_too_many(servers, radix, down, servers_per_tor, tiers))
    per_tor = servers_per_tor or down // nics
    two = tiers == 2 or (tiers is None and servers.count <= radix * per_tor)
    per_pod = servers.count if two else servers_per_pod
    blocks = -(-per_pod // per_tor)
    pods = -(-servers.count // per_pod)
    server = np.arange(servers.count)
    block = server // per_pod * blocks + server % per_pod * blocks // per_pod
    used, tor = np.unique(block, return_inverse=True)
    pod_of: Ints = used // blocks
    assert int(pod_of.max()) == pods - 1
    return ClosCabling(np.repeat(tor, nics), pod_of, ratio)


def tree_faults(
    radix: int, servers_per_pod: int, servers_per_tor: int | None, tiers: int | None
) -> Iterator[ShapeFault]:
    yield from at_least("servers_per_pod", servers_per_pod, 1)
    if servers_per_tor is not None:
        yield from at_least("servers_per_tor", servers_per_tor, 1)
    yield from at_least("radix", radix, 2)
    if tiers not in (None, 2, 3):
        yield ShapeFault("tiers", "must be 2, 3 or none", tiers)


def _too_many(
    servers: Servers, radix: int, down: int, servers_per_tor: int | None, tiers: int | None
) -> Iterator[ShapeFault]:
    nics = servers.nics_per_server
    reach = radix * (servers_per_tor or down // nics) * nics
    if down < nics:
        yield ShapeFault("radix", f"a ToR must have ports for the {nics} NICs of a server", radix)
    elif servers_per_tor is not None and servers_per_tor * nics > down:
        message = f"a ToR of {radix} ports has {down} down, for {down // nics} servers of {nics} NICs"
        yield ShapeFault("servers_per_tor", message, servers_per_tor)
    elif tiers == 2 and servers.nics > reach:
        yield ShapeFault("tiers", f"2 tiers of {radix} ports reach {reach} NICs, and there are {servers.nics}", tiers)
