"""Choose the engine for a request: a strategy by its name, among the engines that the request's tag prefers. Pure.

A strategy is a function of a snapshot. Between the daemon's orders the gateway has only its own counts, so equation 5
is taken with these: `(running + waiting) / concurrency cap / decode rate`, the newcomer counted in. The decode rate is
the one that lies in the daemon's load index; where there is none, engines count as equally fast.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from planner.model import EngineId

# So much of a prompt tells prefixes apart. What is longer in common, as a long system prompt, makes one prefix of all.
PREFIX_TOKENS = 256
PREFIX_CHARACTERS = 1024
AFFINITY_SLACK = 0.25  # of its share, that an engine may have beyond that where it is preferred

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class EngineLoad:
    """One engine that may take a request, now. Counts are the gateway's own; 0 capacity or sequences: unknown."""

    id: EngineId
    running: int = 0
    waiting: int = 0  # without a token yet; those for whom a place is reserved count
    running_tokens: int = 0  # context of the running requests
    waiting_tokens: int = 0  # context that the waiting ones will need
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0  # as last told, less what we have running since; waiting requests not yet taken off
    max_sequences: int = 0
    seconds_per_token: float | None = None  # 1 / decode rate; None: unknown
    pool: str = ""


L = TypeVar("L", bound=EngineLoad)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The request to be placed."""

    context_tokens: int
    prefix: int = 0  # 64 bits: requests with equal ones begin alike; 0: not known
    tag: str = ""


@dataclass(frozen=True, slots=True)
class RoutingSnapshot(Generic[L]):
    """All that a strategy goes by."""

    loads: Sequence[L]  # of engines that may take the newcomer; at least one
    newcomer: RoutedRequest
    last: EngineId | None  # the engine that was chosen last; None: none yet
    slack: int  # requests


def fits(load: EngineLoad, context_tokens: int) -> bool:
    """Whether the context fits beside what runs and what waits; an unknown capacity is no obstacle."""
    return load.kv_capacity_tokens == 0 or load.kv_free_tokens - load.waiting_tokens >= context_tokens


def concurrency_cap(load: EngineLoad, mean_tokens: float) -> int:
    """How many requests the engine can run at once with its present KV margin; 1 where nothing is known of it."""
    cap = load.max_sequences
    if load.kv_capacity_tokens:
        free = load.kv_free_tokens
        by_room = load.running + (int(free // mean_tokens) if free > 0 else 0)
        if not cap or by_room < cap:
            cap = by_room
    return cap if cap > 1 else 1


def scale(loads: Sequence[EngineLoad], context_tokens: int) -> tuple[float, float]:
    """Mean context of a request, the newcomer's counted in, and seconds per token of engines whose own are unknown."""
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
    """For each load: whether it has no KV room for the newcomer, equation 5 with the newcomer, and its requests."""
    mean_tokens, typical_s = scale(loads, context_tokens)
    found = []
    for load in loads:
        # `fits` and `concurrency_cap`, written out: this runs for every engine at every request.
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
    """Return those with KV room, if any has it, that exceed their share of requests by a quarter and the slack at most.

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
    """The least loaded engine by equation 5, among those with KV room; among all where none has room. Ties go to fewer
    requests, then to the smaller id."""
    loads = snapshot.loads
    ids = [load.id for load in loads]
    return min(zip(ranks(loads, snapshot.newcomer.context_tokens), ids, loads, strict=True))[2]  # no two ids are equal


def least_tokens(snapshot: RoutingSnapshot[L]) -> L:
    """The engine that holds the fewest tokens of context, among those with KV room; among all where none has room. Ties
    go to fewer requests, then to the smaller id.

    Attention and KV grow with tokens, not with requests, so prompts of very different lengths count as what they are.
    An engine's size and speed do not count: for fleets of equal engines.
    """
    tokens = snapshot.newcomer.context_tokens

    def rank(load: L) -> tuple[bool, int, int, str]:
        held_tokens = load.running_tokens + load.waiting_tokens
        return not fits(load, tokens), held_tokens, load.running + load.waiting, load.id

    return min(snapshot.loads, key=rank)


def round_robin(snapshot: RoutingSnapshot[L]) -> L:
    """The next id after the one that was chosen last: what most frameworks do, for comparison."""
    later = [load for load in snapshot.loads if snapshot.last is not None and load.id > snapshot.last]
    return min(later or snapshot.loads, key=lambda load: load.id)


def prefix_affinity(snapshot: RoutingSnapshot[L]) -> L:
    """The engine that the prefix ranks highest among those within the slack; by load index without a prefix. Requests
    that begin alike go to the same engine, which has their prefix cached.

    Engines are ranked for each prefix by rendezvous hashing (Thaler and Ravishankar, 1998), which depends on nothing
    but the ids: every gateway, and one that was started again, ranks them the same, and when an engine goes only its
    own prefixes go elsewhere. The first engine is taken that is not loaded too far beyond the least loaded one, as in
    consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016).
    """
    prefix = snapshot.newcomer.prefix
    if not prefix:
        return load_index(snapshot)
    return max(within(snapshot), key=lambda load: score(prefix, load.id))


def prefix_of(group: str, body: Mapping[str, Any]) -> int:
    """64 bits that are equal for requests which begin alike: of the group if there is one, else of the prompt's first
    tokens or characters. 0: neither is there."""
    if group:
        return _digest(b"group", group.encode())
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _digest(b"text", prompt[:PREFIX_CHARACTERS].encode(errors="surrogatepass"))
    if isinstance(prompt, list | tuple):
        # Ids were checked to fit an array when the body was read.
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
    """How much a prefix prefers an engine: the finaliser of splitmix64 over both, a permutation, so no two tie whose
    ids differ in their digest."""
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
    """The engines of the pool that are not loaded too far beyond the least loaded of all. Where there is none, all: to
    wait for the right hardware costs more than the wrong one. So requests of a tag go to the engines of a pool, such as
    decode-heavy tasks to those with much memory bandwidth (RollArt)."""
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
    """How a gateway chooses."""

    policy: str = DEFAULT_POLICY
    affinity: Mapping[str, str] = field(default_factory=dict)  # tag -> pool
    slack: int = DEFAULT_SLACK  # requests that a preferred engine may have beyond its share and a quarter
    # So many requests at most are sent to an engine to wait for their first token, beside those for whom it is known to
    # have seats and KV; the others wait in the gateway. 0: all wait there.
    queue_depth: int = 0
    pools: Mapping[EngineId, str] = field(default_factory=dict)  # of engines for which the daemon names none

    def __post_init__(self) -> None:
        if self.policy not in STRATEGIES:
            raise ValueError(f"policy must be one of {', '.join(STRATEGIES)}, got {self.policy!r}")
        if self.slack < 0:
            raise ValueError(f"slack must be >= 0, got {self.slack}")

    @property
    def by_prefix(self) -> bool:
        """Whether it needs to know newcomers' prefixes."""
        return self.policy == "prefix_affinity"

    def choose(self, loads: Sequence[L], newcomer: RoutedRequest, last: EngineId | None = None) -> L | None:
        """One of the loads; None without any. `last` is the one that was chosen last."""
        if not loads:
            return None
        if len(loads) == 1:
            return loads[0]
        pool = self.affinity.get(newcomer.tag) if self.affinity and newcomer.tag else None
        if pool is not None:
            loads = narrow(RoutingSnapshot(loads, newcomer, last, self.slack), pool)
        chosen: L = STRATEGIES[self.policy](RoutingSnapshot(loads, newcomer, last, self.slack))
        return chosen
