"""`load_index`: the least loaded engine by equation 5. Pure."""

from orchestrrl.gateway.routing.policies.base import L, RoutingSnapshot, ranks


def choose(snapshot: RoutingSnapshot[L]) -> L:
    """Among those with KV room; among all where none has room. Ties go to fewer requests, then to the smaller id."""
    loads = snapshot.loads
    ids = [load.id for load in loads]
    return min(zip(ranks(loads, snapshot.newcomer.context_tokens), ids, loads, strict=True))[2]  # no two ids are equal
