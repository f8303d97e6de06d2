"""What a routing strategy sees and how it compares engines. Pure.

Between the daemon's orders the gateway only knows what it sent itself since, so equation 5 is taken with live counts:
`(running + waiting) / concurrency cap / decode rate`, the newcomer counted in. The decode rate is the one that lies in
the daemon's load index; where there is none, engines count as equally fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from planner.model import EngineId


class BackendLoad(Protocol):
    """One engine that may take a request, now. Counts are the gateway's own; 0 capacity or sequences: unknown.

    A protocol, because the gateway's own slots are it: to copy each of them for every choice costs more than choosing.
    """

    @property
    def id(self) -> EngineId: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def running_tokens(self) -> int: ...  # context of the running requests
    @property
    def waiting_tokens(self) -> int: ...  # context that the waiting ones will need
    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def kv_free_tokens(self) -> int: ...  # as of now, waiting requests not yet taken off
    @property
    def max_sequences(self) -> int: ...
    @property
    def seconds_per_token(self) -> float | None: ...  # 1 / decode rate; None: unknown
    @property
    def pool(self) -> str: ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A load that is a value of its own, for simulations and tests."""

    id: EngineId
    running: int
    waiting: int
    running_tokens: int
    waiting_tokens: int
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0
    max_sequences: int = 0
    seconds_per_token: float | None = None
    pool: str = ""


L = TypeVar("L", bound=BackendLoad)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The request to be placed."""

    context_tokens: int
    prefix: int = 0  # 64 bits: requests with equal ones begin alike; 0: not known
    tag: str = ""


@dataclass(frozen=True, slots=True)
class AffinitySlack:
    """How much more than its share an engine may be given by those who prefer it: `(1 + fraction) * share + requests`.

    Its share are the requests with which it would be as loaded as the least loaded engine.
    """

    requests: int = 8
    fraction: float = 0.25

    def __post_init__(self) -> None:
        if self.requests < 0:
            raise ValueError(f"requests must be >= 0, got {self.requests}")
        if not self.fraction >= 0:
            raise ValueError(f"fraction must be >= 0, got {self.fraction}")


@dataclass(frozen=True, slots=True)
class RoutingSnapshot(Generic[L]):
    """All that a strategy goes by."""

    loads: Sequence[L]  # of engines that may take the newcomer; at least one
    newcomer: RoutedRequest
    last: EngineId | None  # the engine that was chosen last; None: none yet
    slack: AffinitySlack


def fits(load: BackendLoad, context_tokens: int) -> bool:
    """Whether the context fits beside what runs and what waits; an unknown capacity is no obstacle."""
    return load.kv_capacity_tokens == 0 or load.kv_free_tokens - load.waiting_tokens >= context_tokens


def concurrency_cap(load: BackendLoad, mean_tokens: float) -> int:
    """How many requests the engine can run at once with its present KV margin; 1 where nothing is known of it."""
    cap = load.max_sequences
    if load.kv_capacity_tokens:
        free = load.kv_free_tokens
        by_room = load.running + (int(free // mean_tokens) if free > 0 else 0)
        if not cap or by_room < cap:
            cap = by_room
    return cap if cap > 1 else 1


def scale(loads: Sequence[BackendLoad], context_tokens: int) -> tuple[float, float]:
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


def ranks(loads: Sequence[BackendLoad], context_tokens: int) -> list[tuple[bool, float, int]]:
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
    """Those with KV room, if any has it, that are loaded no more than the slack beyond the least loaded of them."""
    slack, loads = snapshot.slack, snapshot.loads
    ranked = ranks(loads, snapshot.newcomer.context_tokens)
    crowded, least, _ = min(ranked)
    factor, more = 1 + slack.fraction, slack.requests
    return [
        load
        for load, (full, index, requests) in zip(loads, ranked, strict=True)
        # Its share are as many requests as bring it to the least index.
        if full == crowded and (index <= least or requests + 1 <= factor * least * (requests + 1) / index + more)
    ]
