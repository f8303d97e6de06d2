"""`least_tokens`: the engine that holds the fewest tokens of context. Pure.

Attention and KV grow with tokens, not with requests, so prompts of very different lengths count as what they are. An
engine's size and speed do not count: for fleets of equal engines.
"""

from orchestrrl.gateway.routing.policies.base import L, RoutingSnapshot, fits


def choose(snapshot: RoutingSnapshot[L]) -> L:
    """Among those with KV room; among all where none has room. Ties go to fewer requests, then to the smaller id."""
    tokens = snapshot.newcomer.context_tokens

    def rank(load: L) -> tuple[bool, int, int, str]:
        held_tokens = load.running_tokens + load.waiting_tokens
        return not fits(load, tokens), held_tokens, load.running + load.waiting, load.id

    return min(snapshot.loads, key=rank)
