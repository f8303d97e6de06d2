"""`load_index`: the least loaded engine by equation 5. Pure."""

from orchestrrl.gateway.routing.base import L, Snapshot, concurrency_cap, fits, scale


def choose(snapshot: Snapshot[L]) -> L:
    """Among those with KV room; among all where none has room. Ties go to fewer requests, then to the smaller id."""
    loads, tokens = snapshot.loads, snapshot.newcomer.context_tokens
    mean_tokens, typical_s = scale(loads, tokens)
    best = loads[0]
    best_index, best_full = float("inf"), True
    for load in loads:
        full = not fits(load, tokens)
        if full and not best_full:
            continue
        requests = load.running + load.waiting
        index = (requests + 1) / concurrency_cap(load, mean_tokens) * (load.seconds_per_token or typical_s)
        if (
            index < best_index
            or (best_full and not full)
            or (index == best_index and (requests, load.id) < (best.running + best.waiting, best.id))
        ):
            best, best_index, best_full = load, index, full
    return best
