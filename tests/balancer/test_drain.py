"""Tests of moving requests away from engines that are being emptied."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.drain import leave
from planner.model import EngineHealth, EngineId, EngineView, RequestId, RequestState, RequestView

NAMES = ("a", "b", "c", "d")


def engine(name: str, max_sequences: int = 8, free_tokens: int = 10_000, pool: str = "") -> EngineView:
    return EngineView(
        EngineId(name), "", None, EngineHealth.OK, 0, 0, 10_000, free_tokens, max_sequences, None, 0.0, pool=pool
    )


def request(
    id: str, on: str | None, tokens: int = 100, state: RequestState = RequestState.RUNNING, movable: bool = True
) -> RequestView:
    return RequestView(RequestId(id), EngineId(on) if on else None, state, tokens, 0, movable=movable)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[EngineView], list[RequestView]]:
    sizes = st.tuples(st.sampled_from([0, 1, 4, 8]), st.sampled_from([0, 50, 500, 5000]), st.sampled_from(["", "p"]))
    engines = [engine(name, *draw(sizes)) for name in NAMES]
    places = st.lists(
        st.tuples(
            st.sampled_from([*NAMES, None]),
            st.integers(1, 900),
            st.sampled_from([RequestState.RUNNING, RequestState.WAITING]),
            st.booleans(),
        ),
        max_size=20,
    )
    return engines, [request(f"r{index:02d}", *place) for index, place in enumerate(draw(places))]


def named(names: Sequence[str]) -> frozenset[EngineId]:
    return frozenset(map(EngineId, names))


subsets = st.sets(st.sampled_from(NAMES)).map(sorted).map(named)


@given(fleets(), subsets, subsets, st.integers(0, 30), st.sets(st.integers(0, 19)))
def test_movable_requests_move_once_and_only_to_willing_engines(
    fleet: tuple[list[EngineView], list[RequestView]],
    leaving: frozenset[EngineId],
    willing: frozenset[EngineId],
    most: int,
    resting: set[int],
) -> None:
    engines, requests = fleet
    excluded = frozenset(RequestId(f"r{index:02d}") for index in resting)
    moves = leave(requests, leaving, engines, willing=willing, max_moves=most, avoid={}, excluded=excluded)
    by_id = {view.id: view for view in requests}
    may = {r.id for r in requests if r.engine in leaving and r.movable and r.id not in excluded}
    targets = willing - leaving
    assert len(moves) == (min(most, len(may)) if targets else 0)
    assert len({move.request for move in moves}) == len(moves)
    for move in moves:
        assert move.request in may
        assert (move.from_engine, move.state) == (by_id[move.request].engine, by_id[move.request].state)
        assert move.to_engine in targets
    states = [move.state is RequestState.RUNNING for move in moves]
    assert states == sorted(states), "who waits moves for nothing, and first"


@given(fleets())
def test_requests_avoid_full_engines_while_others_have_room(
    fleet: tuple[list[EngineView], list[RequestView]],
) -> None:
    engines, requests = fleet
    willing = named(["b", "c", "d"])
    free = {e.id: e.kv_free_tokens for e in engines if e.id in willing}
    tokens = {view.id: view.context_tokens for view in requests}
    for move in leave(requests, named(["a"]), engines, willing=willing, max_moves=99, avoid={}):
        fits = [id for id in free if free[id] >= tokens[move.request]]
        assert move.to_engine in fits or not fits
        free[move.to_engine] -= tokens[move.request]


def test_requests_are_spread_by_share_of_slots_in_use() -> None:
    engines = [engine("a"), engine("b", 8), engine("c", 4), engine("d", 4)]
    requests = [request(f"r{n:02d}", "a") for n in range(14)] + [request("x", "d"), request("y", "d")]
    moves = leave(requests, named(["a"]), engines, willing=named(["b", "c", "d"]), max_moves=99, avoid={})
    assert Counter(move.to_engine for move in moves) == {"b": 8, "c": 4, "d": 2}


def test_own_pool_is_preferred_and_refusing_engines_come_last() -> None:
    engines = [engine("a", pool="p"), engine("b"), engine("c", pool="p"), engine("d", free_tokens=0, pool="p")]

    def goes(*refused: str) -> str:
        (move,) = leave(
            [request("r", "a")],
            named(["a"]),
            engines,
            willing=named(NAMES),
            max_moves=9,
            avoid={RequestId("r"): named(refused)},
        )
        return move.to_engine

    assert goes() == "c"
    assert goes("c") == "b", "rather another pool than no room"
    assert goes("c", "b") == "d"
    assert goes("b", "c", "d") == "c", "all have refused: once more"


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({"kv_free_tokens": 100}, "b"),
        ({"kv_free_tokens": 99}, "c"),
        ({"kv_free_tokens": 0, "kv_capacity_tokens": 0}, "b"),
        ({"kv_free_tokens": 0, "age_s": None}, "b"),
    ],
)
def test_context_fits_exactly_or_where_capacity_is_unknown(changes: dict[str, int | None], goes: str) -> None:
    engines = [engine("a"), replace(engine("b"), **changes), engine("c")]  # type: ignore[arg-type]
    (move,) = leave([request("r", "a")], named(["a"]), engines, willing=named(["b", "c"]), max_moves=9, avoid={})
    assert move.to_engine == goes


def test_no_moves_without_willing_engines() -> None:
    moves = leave([request("r", "a")], named(["a"]), [engine("a")], willing=named(["a"]), max_moves=9, avoid={})
    assert moves == ()
