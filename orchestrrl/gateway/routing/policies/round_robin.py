"""`round_robin`: engines in turn, by id; what most frameworks do, for comparison. Pure."""

from orchestrrl.gateway.routing.policies.base import L, RoutingSnapshot


def choose(snapshot: RoutingSnapshot[L]) -> L:
    """The next id after the one that was chosen last."""
    later = [load for load in snapshot.loads if snapshot.last is not None and load.id > snapshot.last]
    return min(later or snapshot.loads, key=lambda load: load.id)
