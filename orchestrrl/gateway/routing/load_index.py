"""`load_index`: the least loaded engine by equation 5. Pure."""

from math import inf

from orchestrrl.gateway.routing.base import L, Snapshot, scale


def choose(snapshot: Snapshot[L]) -> L:
    """Among those with KV room; among all where none has room. Ties go to fewer requests, then to the smaller id."""
    loads, context_tokens = snapshot.loads, snapshot.newcomer.context_tokens
    mean_tokens, typical_s = scale(loads, context_tokens)
    best, best_index, best_requests, best_full = loads[0], inf, 0, True
    for load in loads:
        # base.fits, base.load_index and base.concurrency_cap, written out: this runs for every engine at every request.
        requests, cap = load.running + load.waiting, load.max_sequences
        full = False
        if load.kv_capacity_tokens:
            free = load.kv_free_tokens
            full = free - load.waiting_tokens < context_tokens
            by_room = load.running + (int(free // mean_tokens) if free > 0 else 0)
            if not cap or by_room < cap:
                cap = by_room
        if full and not best_full:
            continue
        index = (requests + 1) / (cap if cap > 1 else 1) * (load.seconds_per_token or typical_s)
        if index > best_index and full == best_full:
            continue
        if index < best_index or full != best_full or (requests, load.id) < (best_requests, best.id):
            best, best_index, best_requests, best_full = load, index, requests, full
    return best
