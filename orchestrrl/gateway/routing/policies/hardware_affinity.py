"""Hardware affinity: requests of a tag go to the engines of a pool, such as decode-heavy tasks to those with much
memory bandwidth (RollArt). It narrows the candidates; any strategy then chooses among them. Pure."""

from collections.abc import Sequence

from orchestrrl.gateway.routing.policies.base import L, RoutingSnapshot, within


def narrow(snapshot: RoutingSnapshot[L], pool: str) -> Sequence[L]:
    """The engines of the pool that are not loaded too far beyond the least loaded of all. Where there is none, all: to
    wait for the right hardware costs more than the wrong one."""
    inside = sum(load.pool == pool for load in snapshot.loads)
    if not inside or inside == len(snapshot.loads):
        return snapshot.loads
    return [load for load in within(snapshot) if load.pool == pool] or snapshot.loads
