"""Tests of iterations of engines that cannot run all requests at once: joint steps against each engine alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner.solver.end_times
from planner.solver.end_times import iterations

Held = list[tuple[int, int]]  # (footprint, remaining tokens), in order of admission


def one_by_one(requests: Held, slots: int, room: int) -> int:
    """Return the iterations of one engine: admit in order while there is room, decode one token each, drop ended."""
    queue, running, steps = list(requests), list[list[int]](), 0
    while queue or running:
        while queue and len(running) < slots:
            footprint = min(queue[0][0], room)
            if sum(held for held, _ in running) + footprint > room:
                break
            running.append([footprint, queue.pop(0)[1]])
        steps += 1
        running = [[held, left - 1] for held, left in running if left > 1]
    return steps


def side_by_side(engines: list[tuple[Held, int, int]]) -> list[int]:
    sizes = [len(requests) for requests, _, _ in engines]
    flat = [request for requests, _, _ in engines for request in requests]
    footprint, remaining = np.array(flat, dtype=np.int64).T
    starts = np.concatenate([[0], np.cumsum(sizes)])
    slots, room = (np.array([engine[column] for engine in engines], dtype=np.int64) for column in (1, 2))
    return iterations(footprint, remaining, starts, slots, room).tolist()  # type: ignore[no-any-return]


REQUESTS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=16)
ENGINES = st.lists(st.tuples(REQUESTS, st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=12)


@pytest.mark.parametrize("few", [0, 3, 1_000])
@given(engines=ENGINES)
def test_iterations_match_each_engine_alone(engines: list[tuple[Held, int, int]], few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.solver.end_times, "FEW", few)
        assert side_by_side(engines) == [one_by_one(*engine) for engine in engines]


def test_more_requests_may_run_at_once_than_initially() -> None:
    """A long request blocks the others; when it has ended, all of them fit."""
    engine = ([(30, 5), *[(1, 2 + number) for number in range(30)]], 64, 30)
    assert side_by_side([engine] * 40) == [one_by_one(*engine)] * 40 == [36] * 40
