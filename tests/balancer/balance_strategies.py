"""Strategies for small random fleets with many ties, stalls, full caches and unusual limits."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from balance_builders import held_request
from hypothesis import strategies as st

from balancer.load_index import Worker
from planner.model import EngineId, RequestState, RequestView

CONTEXTS = st.sampled_from([0, 1, 2, 3, 5, 8, 40, 100, 101, 900])
RATES = st.one_of(st.none(), st.just(0.0), st.sampled_from([1.0, 2.0, 100.0, 100.5]))


class Problem(NamedTuple):
    """The arguments of `decide` that describe a fleet."""

    theta: float
    workers: tuple[Worker, ...]


@st.composite
def problems(draw: st.DrawFn, max_workers: int = 5, max_requests: int = 6) -> Problem:
    names = [f"w{i}" for i in draw(st.permutations(range(draw(st.integers(0, max_workers)))))]
    # Ids are shuffled, so that only they can break ties between equal contexts.
    ids = iter(draw(st.permutations([f"r{i:02}" for i in range(2 * max_requests * len(names))])))
    return Problem(
        theta=draw(st.sampled_from([0.0, 0.001, 0.1, 1.0])),
        workers=tuple(draw(_workers(name, ids, max_requests)) for name in names),
    )


@st.composite
def _workers(draw: st.DrawFn, name: str, ids: Iterator[str], max_requests: int) -> Worker:
    def requests(state: RequestState) -> tuple[RequestView, ...]:
        contexts = draw(st.lists(CONTEXTS, max_size=max_requests))
        return tuple(held_request(next(ids), context, state) for context in contexts)

    return Worker(
        id=EngineId(name),
        running=requests(RequestState.RUNNING),
        waiting=requests(RequestState.WAITING),
        kv_capacity_tokens=2000,
        kv_free_tokens=draw(st.sampled_from([0, 1, 5, 50, 200, 1000, 2000])),
        max_sequences=draw(st.sampled_from([0, 1, 2, 4, 8, 256])),
        decode_tokens_per_s=draw(RATES),
    )


def random_problem(rng: random.Random) -> Problem:
    """Return a fleet of up to 10 workers under one of several kinds of load, faster than drawing it with hypothesis."""
    stalls, unknown = rng.choice([0.0, 0.0, 0.3]), rng.choice([0.0, 0.3])
    longest, room = rng.choice([3, 50, 4000]), rng.choice([0, 500, 20_000])
    busiest = rng.choice([2, 8])

    def requests(kind: str, place: int, state: RequestState) -> tuple[RequestView, ...]:
        held = rng.randint(0, busiest) if rng.random() < 0.7 else 0
        return tuple(
            held_request(f"{kind}{rng.random():.6f}-{place}", rng.randint(0, longest), state) for _ in range(held)
        )

    def rate() -> float | None:
        if rng.random() < stalls:
            return 0.0
        return None if rng.random() < unknown else rng.choice([50.0, 100.0, rng.uniform(1.0, 2000.0)])

    workers = tuple(
        Worker(
            id=EngineId(f"w{place}"),
            running=requests("a", place, RequestState.RUNNING),
            waiting=requests("b", place, RequestState.WAITING),
            kv_capacity_tokens=20_000,
            kv_free_tokens=rng.randint(0, room),
            max_sequences=rng.choice([0, 1, 3, 8, 64]),
            decode_tokens_per_s=rate(),
        )
        for place in range(rng.randint(1, 10))
    )
    return Problem(rng.choice([0.0, 1e-4, 1e-3, 1e-2]), workers)
