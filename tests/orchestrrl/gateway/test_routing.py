"""Choosing an engine: equation 5 with live counts, room in the KV, ties by id."""

import dataclasses
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.gateway.routing import EngineLoad, RoundRobin, choose, concurrency_cap, fits
from planner.model import EngineId


def load(name: str, running: int = 0, waiting: int = 0, **known: float) -> EngineLoad:
    tokens = {"running_tokens": running * 100, "waiting_tokens": waiting * 100}
    return EngineLoad(EngineId(name), running, waiting, **{**tokens, **known})  # type: ignore[arg-type]


def test_without_any_knowledge_the_fewest_requests_then_the_smallest_id() -> None:
    loads = [load("b", 2), load("a", 2), load("c", 1, 1), load("d", 3)]
    choice = choose(loads, 10)
    assert choice is not None
    assert choice.engine == "a"


def test_more_seats_and_more_speed_draw_more() -> None:
    wide, narrow = load("wide", 4, max_sequences=48), load("narrow", 3, max_sequences=8)
    choice = choose([narrow, wide], 10)
    assert choice is not None
    assert choice.engine == "wide"
    slow = dataclasses.replace(wide, seconds_per_token=0.1)
    fast = dataclasses.replace(narrow, seconds_per_token=0.001)
    choice = choose([slow, fast], 10)
    assert choice is not None
    assert choice.engine == "narrow"


def test_an_engine_without_room_is_taken_only_where_none_has_room() -> None:
    full = load("a", 1, kv_capacity_tokens=1000, kv_free_tokens=50)
    roomy = load("b", 9, kv_capacity_tokens=1000, kv_free_tokens=500)
    choice = choose([full, roomy], 200)
    assert choice is not None
    assert (choice.engine, choice.fits) == ("b", True)
    choice = choose([full, roomy], 900)
    assert choice is not None
    assert not choice.fits


def test_what_waits_has_a_claim_on_the_room() -> None:
    assert fits(load("a", kv_capacity_tokens=1000, kv_free_tokens=300), 250)
    assert not fits(load("a", waiting=1, kv_capacity_tokens=1000, kv_free_tokens=300), 250)


def test_no_engine_no_choice() -> None:
    assert choose([], 1) is None
    assert RoundRobin().choose([]) is None


def test_round_robin_takes_turns_and_survives_changes() -> None:
    turn = RoundRobin()
    three = [load("c"), load("a"), load("b")]
    assert [turn.choose(three).engine for _ in range(4)] == ["a", "b", "c", "a"]  # type: ignore[union-attr]
    two = [load("c"), load("a")]
    assert [turn.choose(two).engine for _ in range(2)] == ["c", "a"]  # type: ignore[union-attr]


loads = st.lists(
    st.builds(
        EngineLoad,
        id=st.sampled_from([EngineId(name) for name in "abcdef"]),
        running=st.integers(0, 50),
        waiting=st.integers(0, 50),
        running_tokens=st.integers(0, 50_000),
        waiting_tokens=st.integers(0, 50_000),
        kv_capacity_tokens=st.sampled_from([0, 100_000]),
        kv_free_tokens=st.integers(-1000, 100_000),
        max_sequences=st.sampled_from([0, 8, 48]),
        seconds_per_token=st.sampled_from([None, 0.001, 0.002]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda load: load.id,
)


@given(loads=loads, context_tokens=st.integers(1, 50_000))
def test_nothing_is_better_than_the_choice(loads: list[EngineLoad], context_tokens: int) -> None:
    choice = choose(loads, context_tokens)
    assert choice is not None
    known = [load.seconds_per_token for load in loads if load.seconds_per_token]
    tokens = sum(load.running_tokens + load.waiting_tokens for load in loads) + context_tokens
    mean = max(1.0, tokens / (sum(load.running + load.waiting for load in loads) + 1))
    best = next(load for load in loads if load.id == choice.engine)

    def key(load: EngineLoad) -> tuple[bool, float, int, str]:
        seconds = load.seconds_per_token or (median(known) if known else 1.0)
        index = (load.running + load.waiting + 1) / concurrency_cap(load, mean) * seconds
        return not fits(load, context_tokens), index, load.running + load.waiting, load.id

    assert all(key(best) <= key(load) for load in loads)
    assert choose(loads[::-1], context_tokens) == choice


@given(loads=loads)
def test_a_cap_is_at_least_one_and_within_its_limits(loads: list[EngineLoad]) -> None:
    for load in loads:
        cap = concurrency_cap(load, 100.0)
        assert cap >= 1
        if load.max_sequences:
            assert cap <= load.max_sequences
