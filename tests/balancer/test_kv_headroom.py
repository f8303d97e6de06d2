"""Tests of KV headroom: an accepted request causes no preemption, however late it arrives, and no request is refused
although there is clearly room."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.kv_headroom import ARRIVES_LATE, BLOCK_TOKENS, MOST_LOOKED_AT, ForecastKvHeadroom
from balancer.load_index import Worker
from planner.model import EngineId, RequestId, RequestState, RequestView

SOURCE, DESTINATION = EngineId("source"), EngineId("destination")
MOVER = RequestId("mover")
Sizes = list[tuple[int, int]]  # context and remaining tokens

sizes = st.tuples(st.integers(1, 400), st.integers(1, 150))


class Stay(NamedTuple):
    """One request on an engine, with remaining tokens per scenario."""

    context_tokens: int
    remaining_tokens: tuple[int, ...]
    runs: bool


class Tenancy(NamedTuple):
    """An engine with its requests and its limits in KV tokens and slots."""

    kv_tokens: int
    seats: int
    stays: Mapping[RequestId, Stay]

    def worker(self, name: EngineId) -> Worker:
        views = [
            RequestView(id, name, RequestState.RUNNING if one.runs else RequestState.WAITING, one.context_tokens, 0)
            for id, one in self.stays.items()
        ]
        running = tuple(view for view in views if view.state is RequestState.RUNNING)
        waiting = tuple(view for view in views if view.state is RequestState.WAITING)
        return Worker(name, running, waiting, self.kv_tokens, self.kv_tokens, self.seats, None)


@dataclass
class Told:
    """Length distributions that return the tokens of the stays and count the calls."""

    stays: Mapping[RequestId, Stay]
    asked: int = 0

    def of(self, requests: Sequence[RequestView]) -> list[tuple[int, ...]]:
        self.asked += 1
        return [self.stays[request.id].remaining_tokens for request in requests]


def headroom(tenancies: Mapping[EngineId, Tenancy], risk: float) -> ForecastKvHeadroom:
    told = Told({id: one for tenancy in tenancies.values() for id, one in tenancy.stays.items()})
    workers = tuple(tenancy.worker(name) for name, tenancy in tenancies.items())
    return ForecastKvHeadroom(workers, told, risk)


def stay(*remaining: int, context: int = 100, runs: bool = True) -> Stay:
    return Stay(context, remaining, runs)


def room(
    held: dict[str, Stay], mover: Stay, *, kv_tokens: int, seats: int = 64, risk: float = 0.0
) -> ForecastKvHeadroom:
    stays = {RequestId(name): one for name, one in held.items()}
    tenancies = {SOURCE: Tenancy(10**6, 64, {MOVER: mover}), DESTINATION: Tenancy(kv_tokens, seats, stays)}
    return headroom(tenancies, risk)


def needed_blocks(held: Sizes, newcomer: tuple[int, int], late: int) -> int:
    """Return the maximum number of blocks in use if the new request begins `late` iterations after the others."""
    most = 0
    for done in range(max(remaining for _, remaining in [*held, newcomer]) + late):
        alive = [context + done + 1 for context, remaining in held if remaining > done]
        if 0 <= done - late < newcomer[1]:
            alive.append(newcomer[0] + done - late + 1)
        most = max(most, sum(-(-tokens // BLOCK_TOKENS) for tokens in alive))
    return most


@given(st.lists(sizes, max_size=8), sizes, st.integers(0, ARRIVES_LATE), st.integers(0, 5000))
def test_request_that_fits_causes_no_preemption_until_it_ends(
    held: Sizes, newcomer: tuple[int, int], late: int, kv_tokens: int
) -> None:
    stays = {f"r{i}": stay(remaining, context=context) for i, (context, remaining) in enumerate(held)}
    fits = room(stays, stay(newcomer[1], context=newcomer[0]), kv_tokens=kv_tokens).fits(MOVER, SOURCE, DESTINATION)
    if fits:
        assert needed_blocks(held, newcomer, late) <= kv_tokens // BLOCK_TOKENS


@given(st.lists(sizes, max_size=8), sizes)
def test_available_room_is_not_denied(held: Sizes, newcomer: tuple[int, int]) -> None:
    """The reserve is limited to rounding to blocks and a late arrival."""
    stays = {f"r{i}": stay(remaining, context=context) for i, (context, remaining) in enumerate(held)}
    late = max(needed_blocks(held, newcomer, late) for late in range(0, ARRIVES_LATE + 1, 4)) * BLOCK_TOKENS
    enough = late + BLOCK_TOKENS * (len(held) + 1) + 2 * ARRIVES_LATE * (len(held) + 1)
    assert room(stays, stay(newcomer[1], context=newcomer[0]), kv_tokens=enough).fits(MOVER, SOURCE, DESTINATION)


class Plain:
    """A simple and slow implementation of an engine's headroom."""

    def __init__(self, tenancy: Tenancy, risk: float) -> None:
        self.kv_tokens, self.seats, self.risk = tenancy.kv_tokens, tenancy.seats, risk
        self.held = [(one, not one.runs) for one in tenancy.stays.values()]  # with a flag for a late start
        self.refused = inf

    def needed(self, held: list[tuple[Stay, bool]], future: int) -> int:
        ends = [(one.context_tokens, one.remaining_tokens[future] + ARRIVES_LATE * late) for one, late in held]
        return max((sum(context + end for context, until in ends if until >= end) for _, end in ends), default=0)

    def too_much(self, held: list[tuple[Stay, bool]], kv_tokens: int) -> bool:
        return sum(self.needed(held, future) > kv_tokens for future in range(FUTURES)) > int(self.risk * FUTURES)

    def takes(self, mover: Stay) -> bool:
        punctual, count = [(one, False) for one, _ in self.held], len(self.held)
        if not mover.runs and (count > self.seats or self.too_much(punctual, self.kv_tokens + ROUNDING * count)):
            return True
        size = mover.context_tokens + sum(mover.remaining_tokens) / FUTURES
        if count >= self.seats or size >= self.refused:
            return False
        if self.too_much([*self.held, (mover, True)], self.kv_tokens - ROUNDING * (count + 1)):
            self.refused = size
            return False
        return True


FUTURES, ROUNDING = 2, BLOCK_TOKENS - 1
lasting = st.tuples(*[st.sampled_from([1, 5, 50, 64, 65, 100])] * FUTURES)
any_stay = st.builds(Stay, st.sampled_from([1, 10, 40]), lasting, st.booleans())
risks = st.sampled_from([0.0, 0.5])


@given(st.lists(any_stay, max_size=5), any_stay, risks, st.integers(0, 6), st.sampled_from([-1, 0]), st.data())
def test_room_is_exact_to_the_token(
    held: list[Stay], mover: Stay, risk: float, seats: int, more: int, data: st.DataObject
) -> None:
    plain = Plain(Tenancy(0, seats, {RequestId(f"r{i}"): one for i, one in enumerate(held)}), risk)
    future = data.draw(st.sampled_from(range(FUTURES)))
    with_mover = plain.needed([*plain.held, (mover, True)], future) + ROUNDING * (len(held) + 1)
    without = plain.needed([(one, False) for one in held], future) - ROUNDING * len(held)
    plain.kv_tokens = max(0, data.draw(st.sampled_from([with_mover, without])) + more)
    stays = {f"r{i}": one for i, one in enumerate(held)}
    asked = room(stays, mover, kv_tokens=plain.kv_tokens, seats=seats, risk=risk)
    assert asked.fits(MOVER, SOURCE, DESTINATION) == plain.takes(mover)


@given(st.lists(st.lists(any_stay, max_size=4), min_size=3, max_size=3), risks, st.integers(100, 900), st.data())
def test_room_is_updated_after_each_move(
    held: list[list[Stay]], risk: float, kv_tokens: int, data: st.DataObject
) -> None:
    tenancies = {
        EngineId(f"e{i}"): Tenancy(kv_tokens, 4, {RequestId(f"r{i}{n}"): one for n, one in enumerate(stays)})
        for i, stays in enumerate(held)
    }
    plain = {name: Plain(tenancy, risk) for name, tenancy in tenancies.items()}
    asked = headroom(tenancies, risk)
    places = [(name, request, one) for name, tenancy in tenancies.items() for request, one in tenancy.stays.items()]
    for moving in (False, True):
        for source, request, mover in data.draw(st.permutations(places)):
            for destination in sorted(set(plain) - {source}):
                fits = plain[destination].takes(mover)
                assert asked.fits(request, source, destination) == fits
                if fits and moving:
                    asked.moved(request, source, destination)
                    plain[source].held.remove((mover, not mover.runs))
                    plain[source].refused = inf
                    plain[destination].held.append((mover, True))
                    break


def test_requests_that_end_soon_free_room_for_growing_ones() -> None:
    short = {"short": stay(10, context=2_000)}
    assert room(short, stay(1_500, context=500), kv_tokens=2_700).fits(MOVER, SOURCE, DESTINATION)
    long = {"long": stay(1_000, context=2_000)}
    assert not room(long, stay(1_500, context=500), kv_tokens=2_700).fits(MOVER, SOURCE, DESTINATION)


def test_running_requires_a_free_slot() -> None:
    held = {"r0": stay(10), "r1": stay(10)}
    assert not room(held, stay(10), kv_tokens=10_000, seats=2).fits(MOVER, SOURCE, DESTINATION)
    assert room(held, stay(10), kv_tokens=10_000, seats=3).fits(MOVER, SOURCE, DESTINATION)


def test_waiting_request_may_move_to_an_overcommitted_engine() -> None:
    crowd = {f"r{i}": stay(1_000) for i in range(4)}
    assert room(crowd, stay(1_000, runs=False), kv_tokens=2_000).fits(MOVER, SOURCE, DESTINATION)
    assert not room(crowd, stay(1_000), kv_tokens=2_000).fits(MOVER, SOURCE, DESTINATION)
    fitting = {f"r{i}": stay(300) for i in range(4)}
    assert not room(fitting, stay(1_000, runs=False), kv_tokens=2_000).fits(MOVER, SOURCE, DESTINATION)


@pytest.mark.parametrize(("risk", "fits"), [(0.0, False), (0.2, False), (0.25, True)])
def test_risk_limits_the_share_of_failing_scenarios(risk: float, fits: bool) -> None:
    mover = stay(10, 20, 30, 5_000)
    assert room({}, mover, kv_tokens=1_000, risk=risk).fits(MOVER, SOURCE, DESTINATION) is fits


@pytest.mark.parametrize("held", [[stay(10)], [stay(10, 20), stay(10)]])
def test_lengths_need_equal_numbers_of_scenarios(held: list[Stay]) -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        room({f"r{i}": one for i, one in enumerate(held)}, stay(10, 20), kv_tokens=5_000).fits(
            MOVER, SOURCE, DESTINATION
        )


def test_moves_use_and_free_room() -> None:
    a, b, c = EngineId("a"), EngineId("b"), EngineId("c")
    one, two, three = RequestId("r1"), RequestId("r2"), RequestId("r3")
    tenancies = {
        a: Tenancy(2_000, 8, {one: stay(500, context=500), two: stay(500, context=500)}),
        b: Tenancy(1_500, 8, {three: stay(300)}),
        c: Tenancy(9_000, 8, {}),
    }
    both = headroom(tenancies, 0.0)
    assert both.fits(one, a, b)
    assert both.fits(two, a, b)
    both.moved(one, a, b)
    assert not both.fits(two, a, b)
    both.moved(three, b, c)
    assert not both.fits(two, a, b)
    assert both.fits(two, a, c)


def test_engines_beyond_the_limit_are_not_examined() -> None:
    names = [EngineId(f"e{i}") for i in range(MOST_LOOKED_AT + 5)]
    workers = [Tenancy(10**6, 64, {}).worker(name) for name in names]
    workers.append(Tenancy(10**6, 64, {MOVER: stay(1)}).worker(SOURCE))
    told = Told({MOVER: stay(1)})
    many = ForecastKvHeadroom(workers, told, 0.0)
    answers = [many.fits(MOVER, SOURCE, name) for name in names]
    assert answers == [True] * MOST_LOOKED_AT + [False] * 5
    assert told.asked == MOST_LOOKED_AT + 1


@pytest.mark.parametrize("risk", [-0.1, 1.0, float("nan")])
def test_invalid_risk_is_rejected(risk: float) -> None:
    with pytest.raises(ValueError, match="risk must be >= 0 and < 1"):
        headroom({}, risk)
