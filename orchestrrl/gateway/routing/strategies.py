"""Choose the engine for a request with a named strategy, among the engines that the request's tag prefers. The
functions have no side effects.

A strategy is a function of a RoutingSnapshot. The load index is equation 5 of the OrchestrRL paper: `(running +
waiting) / concurrency cap / decode rate`. The gateway evaluates it with its own counts, including the new request. The
decode rate is derived from the daemon's load index. Engines without a known rate are assumed to have the median rate.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Any, Generic, TypeVar

from orchestrrl.gateway.routing.measured_line import MeasuredLine
from planner.model import EngineId

# The length of the prompt prefix that is hashed. Prompts that share more, such as a long system prompt, share a prefix.
PREFIX_TOKENS = 256
PREFIX_CHARACTERS = 1024
AFFINITY_SLACK = 0.25  # a preferred engine may exceed its share of requests by this fraction

_MASK = (1 << 64) - 1
new_cache = count(1).__next__  # returns a number that identifies the contents of one engine's KV cache


@dataclass(slots=True)
class EngineLoad:
    """The current load of one engine. The counts include only the requests of this gateway. A KV capacity or sequence
    limit of 0 means that the value is unknown."""

    id: EngineId
    running: int = 0
    waiting: int = 0  # requests without a token, including those with a reserved place
    running_tokens: int = 0  # context of the running requests
    waiting_tokens: int = 0  # context that the waiting requests will need
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0  # last report, less tokens of this gateway's requests since; waiting ones not subtracted
    max_sequences: int = 0
    seconds_per_token: float | None = None  # 1 / decode rate; None: unknown
    pool: str = ""
    cache: int = field(default_factory=new_cache)  # a new number whenever the engine loses its KV cache
    computed_tokens: int = 0  # prompt tokens that were expected to be prefilled, and generated tokens
    cached_waiting_tokens: int = 0  # the part of `waiting_tokens` that is expected in the KV cache
    prefill_times: MeasuredLine = field(default_factory=lambda: MeasuredLine(through_zero=True))  # per waiting token
    load_times: MeasuredLine = field(default_factory=lambda: MeasuredLine(through_zero=True))  # per loaded KV token
    step_times: MeasuredLine = field(default_factory=MeasuredLine)  # per running request

    @property
    def prefill_tokens(self) -> int:
        """The tokens to prefill for the waiting requests."""
        return max(0, self.waiting_tokens - self.cached_waiting_tokens)


L = TypeVar("L", bound=EngineLoad)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The properties of a request that determine its engine."""

    context_tokens: int
    prefix: int = 0  # 64-bit hash, equal for requests that begin alike; 0: unknown
    tag: str = ""
    session: str = ""  # empty: none


@dataclass(frozen=True, slots=True)
class RoutingSnapshot(Generic[L]):
    """The input of a routing strategy."""

    loads: Sequence[L]  # engines that may accept the new request; at least one
    newcomer: RoutedRequest
    last: EngineId | None  # the engine chosen last; None: none yet
    slack: int  # requests


def fits(load: EngineLoad, context_tokens: int) -> bool:
    """Return whether the KV cache has room for `context_tokens` tokens in addition to the running and waiting requests.
    Return True if the capacity is unknown."""
    return load.kv_capacity_tokens == 0 or load.kv_free_tokens - load.waiting_tokens >= context_tokens


def concurrency_cap(load: EngineLoad, mean_tokens: float) -> int:
    """Return the number of requests that the engine can run at once, if each request in addition to the running
    requests needs `mean_tokens` tokens of free KV. The number is 1 if the engine's limits are unknown."""
    cap = load.max_sequences
    if load.kv_capacity_tokens:
        free = load.kv_free_tokens
        by_room = load.running + (int(free // mean_tokens) if free > 0 else 0)
        if not cap or by_room < cap:
            cap = by_room
    return cap if cap > 1 else 1


def scale(loads: Sequence[EngineLoad], context_tokens: int) -> tuple[float, float]:
    """Return two values: the mean context of all requests, including the new one, in tokens, and the median time per
    token of all engines with a known decode rate, in seconds. The median is used for the other engines."""
    held, requests = context_tokens, 1
    known: list[float] = []
    for load in loads:
        held += load.running_tokens + load.waiting_tokens
        requests += load.running + load.waiting
        if load.seconds_per_token:
            known.append(load.seconds_per_token)
    if not known:
        return max(1.0, held / requests), 1.0
    known.sort()
    middle = len(known) // 2
    typical_s = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
    return max(1.0, held / requests), typical_s


def ranks(loads: Sequence[EngineLoad], context_tokens: int) -> list[tuple[bool, float, int]]:
    """Return a tuple for each load. It contains whether the KV cache lacks room for the new request, the load index
    including the new request, and the number of running and waiting requests. Better engines have lower tuples."""
    mean_tokens, typical_s = scale(loads, context_tokens)
    found = []
    for load in loads:
        # `fits` and `concurrency_cap` are inlined because this runs for every engine at every request.
        running, cap, full = load.running, load.max_sequences, False
        requests = running + load.waiting
        if load.kv_capacity_tokens:
            free = load.kv_free_tokens
            full = free - load.waiting_tokens < context_tokens
            by_room = running + (int(free // mean_tokens) if free > 0 else 0)
            if not cap or by_room < cap:
                cap = by_room
        index = (requests + 1) / (cap if cap > 1 else 1) * (load.seconds_per_token or typical_s)
        found.append((full, index, requests))
    return found


def within(snapshot: RoutingSnapshot[L]) -> list[L]:
    """Return the engines that exceed their share of requests by at most the fraction `AFFINITY_SLACK` of the share plus
    `snapshot.slack` requests. If any engine has KV room, only engines with KV room are returned.

    An engine's share is the number of requests with which it would be as loaded as the least loaded engine.
    """
    ranked = ranks(snapshot.loads, snapshot.newcomer.context_tokens)
    crowded, least, _ = min(ranked)
    most, more = (1 + AFFINITY_SLACK) * least, snapshot.slack
    return [
        load
        for load, (full, index, requests) in zip(snapshot.loads, ranked, strict=True)
        if full == crowded and (index <= least or requests + 1 <= most * (requests + 1) / index + more)
    ]


# --- strategies -----------------------------------------------------------------------------------------------------


def load_index(snapshot: RoutingSnapshot[L]) -> L:
    """Return the engine with the lowest load index among the engines with KV room, or among all engines if none has
    room. Ties go to the engine with fewer requests, then to the engine with the smaller id."""
    loads = snapshot.loads
    ids = [load.id for load in loads]
    return min(zip(ranks(loads, snapshot.newcomer.context_tokens), ids, loads, strict=True))[2]  # no two ids are equal


def least_tokens(snapshot: RoutingSnapshot[L]) -> L:
    """Return the engine with the fewest context tokens among the engines with KV room, or among all engines if none has
    room. Ties go to the engine with fewer requests, then to the engine with the smaller id.

    Attention and KV grow with tokens, so this strategy suits prompts of very different lengths. It ignores the size and
    speed of engines, so it suits fleets of equal engines.
    """
    tokens = snapshot.newcomer.context_tokens

    def rank(load: L) -> tuple[bool, int, int, str]:
        held_tokens = load.running_tokens + load.waiting_tokens
        return not fits(load, tokens), held_tokens, load.running + load.waiting, load.id

    return min(snapshot.loads, key=rank)


def round_robin(snapshot: RoutingSnapshot[L]) -> L:
    """Return the engine with the next id after the engine chosen last. The smallest id follows the largest. Most
    frameworks route in this way, so the strategy is provided for comparison."""
    later = [load for load in snapshot.loads if snapshot.last is not None and load.id > snapshot.last]
    return min(later or snapshot.loads, key=lambda load: load.id)


def prefix_affinity(snapshot: RoutingSnapshot[L]) -> L:
    """Return the engine with the highest `score` for the request's prefix among the engines that `within` returns.
    Requests that begin alike thus go to the engine that has their prefix cached. Without a prefix, return the choice of
    `load_index`.

    Engines are ranked for each prefix by rendezvous hashing (Thaler and Ravishankar, 1998). The ranking depends only on
    the ids, so it is the same in every gateway and after a restart. When an engine leaves, only the prefixes of that
    engine move. Engines that are loaded too far beyond the least loaded engine are skipped, as in consistent hashing
    with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016).
    """
    prefix = snapshot.newcomer.prefix
    if not prefix:
        return load_index(snapshot)
    return max(within(snapshot), key=lambda load: score(prefix, load.id))


def prefix_of(group: str, body: Mapping[str, Any]) -> int:
    """Return a 64-bit hash that is equal for requests with the same prefix. It is a hash of the group if the request
    has one, else of the prompt's first tokens or characters. Returns 0 if there is neither a group nor a prompt."""
    if group:
        return _digest(b"group", group.encode())
    prompt = body.get("prompt", body.get("token_ids"))
    if isinstance(prompt, str):
        return _digest(b"text", prompt[:PREFIX_CHARACTERS].encode(errors="surrogatepass"))
    if isinstance(prompt, list | tuple):
        # Parsing of the body has checked that the ids fit an array.
        return _digest(b"tokens", array("I", prompt[:PREFIX_TOKENS]).tobytes())
    messages = body.get("messages")
    if not isinstance(messages, list):
        return 0
    text, left = [], PREFIX_CHARACTERS
    for message in messages:
        piece = str(message.get("content", "") if isinstance(message, Mapping) else message)[:left]
        text.append(piece)
        left -= len(piece)
        if left <= 0:
            break
    return _digest(b"chat", "\0".join(text).encode(errors="surrogatepass"))


def score(prefix: int, engine: str) -> int:
    """Return the score of an engine for a prefix; the engine with the highest score is preferred. The score is the
    finaliser of splitmix64, applied to the XOR of the prefix and the engine's digest. The finaliser is a permutation,
    so engines whose digests differ never tie."""
    mixed = prefix ^ _engine_digest(engine)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)


@lru_cache(maxsize=1 << 14)
def _engine_digest(engine: str) -> int:
    return _digest(b"engine", engine.encode())


def _digest(kind: bytes, data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, person=kind).digest(), "big") or 1


def narrow(snapshot: RoutingSnapshot[L], pool: str) -> Sequence[L]:
    """Return the engines of the pool that `within` returns. If there are none, return all engines, because waiting for
    the preferred hardware would take longer than using other hardware. A tag can thus prefer a pool, e.g. a pool with
    high memory bandwidth for decode-heavy tasks (RollArt)."""
    inside = sum(load.pool == pool for load in snapshot.loads)
    if not inside or inside == len(snapshot.loads):
        return snapshot.loads
    return [load for load in within(snapshot) if load.pool == pool] or snapshot.loads


DEFAULT_POLICY = "load_index"
DEFAULT_SLACK = 8

STRATEGIES: Mapping[str, Callable[[RoutingSnapshot[Any]], Any]] = {
    "load_index": load_index,
    "least_tokens": least_tokens,
    "prefix_affinity": prefix_affinity,
    "round_robin": round_robin,
}


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """The routing settings of a gateway."""

    policy: str = DEFAULT_POLICY
    affinity: Mapping[str, str] = field(default_factory=dict)  # tag -> pool
    slack: int = DEFAULT_SLACK  # requests that a preferred engine may have beyond its share and AFFINITY_SLACK
    # The most requests that wait on an engine for their first token, beyond those for which it is known to have seats
    # and KV. Further requests wait in the gateway. 0: no limit, all requests wait on engines.
    queue_depth: int = 0
    pools: Mapping[EngineId, str] = field(default_factory=dict)  # pools of engines for which the daemon names none
    session_ttl_s: float = 600.0  # after a session's last token, it is forgotten; 0: sessions are ignored

    def __post_init__(self) -> None:
        if self.policy not in STRATEGIES:
            raise ValueError(f"policy must be one of {', '.join(STRATEGIES)}, got {self.policy!r}")
        if self.slack < 0:
            raise ValueError(f"slack must be >= 0, got {self.slack}")
        if not self.session_ttl_s >= 0:
            raise ValueError(f"session_ttl_s must be >= 0, got {self.session_ttl_s:g}")

    @property
    def by_prefix(self) -> bool:
        """Return whether the strategy uses the prefixes of requests."""
        return self.policy == "prefix_affinity"

    def choose(self, loads: Sequence[L], newcomer: RoutedRequest, last: EngineId | None = None) -> L | None:
        """Return the load of the chosen engine, or None if `loads` is empty. `last` is the engine chosen last."""
        if not loads:
            return None
        if len(loads) == 1:
            return loads[0]
        chosen: L = STRATEGIES[self.policy](self.snapshot(loads, newcomer, last))
        return chosen

    def snapshot(self, loads: Sequence[L], newcomer: RoutedRequest, last: EngineId | None = None) -> RoutingSnapshot[L]:
        """Return the input of a strategy: the engines of `loads`, at least one, that the request's tag prefers."""
        snapshot = RoutingSnapshot(loads, newcomer, last, self.slack)
        pool = self.affinity.get(newcomer.tag) if self.affinity and newcomer.tag else None
        return snapshot if pool is None else replace(snapshot, loads=narrow(snapshot, pool))
