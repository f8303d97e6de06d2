"""Choose the engine for a request: the daemon's routes, brought up to date with the gateway's own counts. Pure.

Between the daemon's orders the gateway only knows what it sent itself since, so equation 5 is taken with live counts:
`(running + waiting) / concurrency cap / decode rate`, the newcomer counted in. The decode rate is the one that lies in
the daemon's load index; where there is none, engines count as equally fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from planner.model import EngineId


class Policy(StrEnum):
    LOAD_INDEX = "load_index"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine that may take a request. Counts are the gateway's own, now; 0 capacity or sequences: unknown."""

    id: EngineId
    running: int
    waiting: int
    running_tokens: int  # context of the running requests
    waiting_tokens: int  # context that the waiting ones will need
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0  # as of now, waiting requests not yet taken off
    max_sequences: int = 0
    seconds_per_token: float | None = None  # 1 / decode rate; None: unknown

    @property
    def requests(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine, and the number that it was chosen by."""

    engine: EngineId
    load_index: float
    fits: bool  # its KV has room for the request now


def choose(loads: Sequence[EngineLoad], context_tokens: int) -> Choice | None:
    """The least loaded engine by equation 5 among those with KV room; among all where none has room. Ties go to the
    fewer requests, then to the smaller id. None without engines."""
    if not loads:
        return None
    known = [load.seconds_per_token for load in loads if load.seconds_per_token]
    typical_s = median(known) if known else 1.0
    held = sum(load.running_tokens + load.waiting_tokens for load in loads) + context_tokens
    mean_tokens = max(1.0, held / (sum(load.requests for load in loads) + 1))

    def rank(load: EngineLoad) -> tuple[bool, float, int, EngineId]:
        index = load_index(load, mean_tokens, typical_s)
        return not fits(load, context_tokens), index, load.requests, load.id

    best = min(loads, key=rank)
    return Choice(best.id, load_index(best, mean_tokens, typical_s), fits(best, context_tokens))


def fits(load: EngineLoad, context_tokens: int) -> bool:
    """Whether the context fits beside what runs and what waits; an unknown capacity is no obstacle."""
    return load.kv_capacity_tokens == 0 or load.kv_free_tokens - load.waiting_tokens >= context_tokens


def load_index(load: EngineLoad, mean_tokens: float, typical_s: float) -> float:
    """Equation 5 with one more request."""
    return (load.requests + 1) / concurrency_cap(load, mean_tokens) * (load.seconds_per_token or typical_s)


def concurrency_cap(load: EngineLoad, mean_tokens: float) -> float:
    """How many requests the engine can run at once with its present KV margin; 1 where nothing is known of it."""
    limits = []
    if load.max_sequences:
        limits.append(load.max_sequences)
    if load.kv_capacity_tokens:
        limits.append(load.running + int(max(0, load.kv_free_tokens) // mean_tokens))
    return max(1, min(limits)) if limits else 1


class RoundRobin:
    """Engines in turn, by id: what most frameworks do, for comparison."""

    def __init__(self) -> None:
        self._last = EngineId("")

    def choose(self, loads: Sequence[EngineLoad]) -> Choice | None:
        if not loads:
            return None
        ids = sorted(load.id for load in loads)
        self._last = next((engine for engine in ids if engine > self._last), ids[0])
        return Choice(self._last, 0.0, True)
