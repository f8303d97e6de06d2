"""Tests of packing: predicted ends match stepped engines, and no move loses a request, breaks a limit or costs time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.balance import _slowed
from balancer.load_index import Worker
from balancer.load_index_moves import MAX_MOVES
from balancer.packing import MIN_GAIN_SHARE, NO_GAIN, SOURCES, Packing, _Load
from balancer.packing import pack as pack_workers
from planner.model import Configuration, ConfigurationId, EngineId, RequestId, RequestState, RequestView

CONFIGURATION = Configuration(
    id=ConfigurationId("tp2"),
    gpus=2,
    alpha_s=0.0184,
    beta_s=8.1e-5,
    gamma_s=4.1e-8,
    kv_capacity_tokens=582_885,
    max_sequences=64,
    prefill_tokens_per_s=18_000.0,
    switch_s=1.7,
)
TOLERANCE = 0.05


@dataclass(frozen=True)
class PackingRequest:
    """One request with its expected remaining tokens."""

    id: RequestId
    state: RequestState
    context_tokens: int
    remaining_tokens: float
    movable: bool = True
    group: str = ""
    prompt_tokens: int = 0

    @property
    def view(self) -> RequestView:
        generated_tokens = self.context_tokens - self.prompt_tokens
        return RequestView(self.id, None, self.state, self.prompt_tokens, generated_tokens, group=self.group)


@dataclass(frozen=True)
class PackingEngine:
    """One engine with its requests and the factor by which it is slower than its configuration."""

    id: EngineId
    configuration: Configuration
    requests: tuple[PackingRequest, ...]
    kv_free_tokens: int
    slowdown: float = 1.0

    @property
    def worker(self) -> Worker:
        running = tuple(request.view for request in self.requests if request.state is RequestState.RUNNING)
        waiting = tuple(request.view for request in self.requests if request.state is RequestState.WAITING)
        most = self.configuration
        return Worker(self.id, running, waiting, most.kv_capacity_tokens, self.kv_free_tokens, most.max_sequences, None)

    @property
    def own(self) -> Configuration:
        return _slowed(self.configuration, self.slowdown)


def remaining_of(engines: Sequence[PackingEngine]) -> dict[RequestId, float]:
    return {request.id: request.remaining_tokens for one in engines for request in one.requests}


def pack(engines: Sequence[PackingEngine], **knobs: object) -> Packing:
    stuck = frozenset(request.id for one in engines for request in one.requests if not request.movable)
    own = {one.id: one.own for one in engines}
    return pack_workers([one.worker for one in engines], own, remaining_of(engines), stuck=stuck, **knobs)  # type: ignore[arg-type]


def packing_request(
    name: str, remaining: float, context: int = 500, *, movable: bool = True, waits: bool = False
) -> PackingRequest:
    state = RequestState.WAITING if waits else RequestState.RUNNING
    return PackingRequest(RequestId(name), state, context, remaining, movable)


def engine(
    name: str,
    *requests: PackingRequest,
    free: int | None = None,
    configuration: Configuration = CONFIGURATION,
    slowdown: float = 1.0,
) -> PackingEngine:
    resident = sum(request.context_tokens for request in requests if request.state is RequestState.RUNNING)
    room = max(0, configuration.kv_capacity_tokens - resident) if free is None else free
    return PackingEngine(EngineId(name), configuration, requests, room, slowdown)


def alike(name: str, count: int, remaining: float, context: int = 500) -> PackingEngine:
    return engine(name, *(packing_request(f"{name}-r{i:02d}", remaining, context) for i in range(count)))


def packing(*engines: PackingEngine, max_moves: int = 1000, tolerance: float = TOLERANCE) -> Packing:
    return pack(engines, max_moves=max_moves, tolerance=tolerance)


def stepped_s(engine: PackingEngine) -> float:
    """Return the end of an engine that runs all its requests at once, iteration by iteration."""
    configuration, seconds, done = engine.configuration, 0.0, 0
    while running := [request for request in engine.requests if request.remaining_tokens > done]:
        kv_tokens = sum(request.context_tokens + done for request in running)
        seconds += configuration.step_s(len(running), kv_tokens) * engine.slowdown
        done += 1
    return seconds


outlooks = st.tuples(st.integers(1, 400), st.integers(1, 3000), st.booleans(), st.booleans())


@st.composite
def fleets(draw: st.DrawFn) -> list[PackingEngine]:
    """Draw a few engines, some of them different, some short of KV, slots or free room."""
    fleet = []
    for index in range(draw(st.integers(1, 5))):
        held = [
            packing_request(f"e{index}-r{i}", remaining, context, movable=movable, waits=waits)
            for i, (remaining, context, movable, waits) in enumerate(draw(st.lists(outlooks, max_size=8)))
        ]
        configuration = replace(
            CONFIGURATION,
            alpha_s=draw(st.sampled_from([0.0143, 0.0184])),
            max_sequences=draw(st.sampled_from([2, 64])),
            kv_capacity_tokens=draw(st.sampled_from([5_000, 582_885])),
        )
        free = draw(st.one_of(st.none(), st.integers(0, 5_000)))
        slowdown = draw(st.sampled_from([1.0, 3.0]))
        fleet.append(engine(f"e{index}", *held, free=free, configuration=configuration, slowdown=slowdown))
    return fleet


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3000)), max_size=12), st.sampled_from([1.0, 2.5]))
def test_an_engine_with_room_ends_when_its_iterations_do(held: list[tuple[int, int]], slowdown: float) -> None:
    requests = [packing_request(f"r{i}", remaining, context) for i, (remaining, context) in enumerate(held)]
    alone = engine("e0", *requests, slowdown=slowdown)
    # The closed form counts r * r / 2 of a request's own growth; iterations hold r * (r - 1) / 2.
    growth_s = sum(request.remaining_tokens for request in requests) / 2 * CONFIGURATION.gamma_s * slowdown
    assert packing(alone).ends_before_s[alone.id] == pytest.approx(stepped_s(alone) + growth_s)


@given(fleets(), st.integers(0, 6))
def test_moves_are_valid_and_within_limits(fleet: list[PackingEngine], max_moves: int) -> None:
    result = packing(*fleet, max_moves=max_moves)
    held = {(request.id, engine.id): request for engine in fleet for request in engine.requests}
    assert len(result.moves) <= max_moves
    assert len({move.request for move in result.moves}) == len(result.moves)
    for move in result.moves:
        request = held[move.request, move.from_engine]  # the request is on the move's source
        assert request.movable
        assert request.state is move.state
        assert move.to_engine != move.from_engine
        assert move.to_engine in {engine.id for engine in fleet}
    assert (result.stopped_because == MAX_MOVES) == (len(result.moves) == max_moves)


@given(fleets())
def test_no_move_is_expected_to_cost_time(fleet: list[PackingEngine]) -> None:
    result = packing(*fleet)
    assert result.makespan_after_s <= result.makespan_before_s * (1 + 1e-9)
    if not result.moves:
        assert result.ends_after_s == result.ends_before_s
        assert result.stopped_because == NO_GAIN


@given(fleets(), st.sampled_from([0.0, 0.05, 0.5]))
def test_a_move_gains_and_goes_to_an_engine_that_ends_earlier_by_the_tolerance(
    fleet: list[PackingEngine], tolerance: float
) -> None:
    result = packing(*fleet, max_moves=1, tolerance=tolerance)
    for move in result.moves:
        source_s, destination_s = (result.ends_before_s[end] for end in (move.from_engine, move.to_engine))
        assert destination_s < source_s * (1 - tolerance)
        after_s = max(result.ends_after_s[end] for end in (move.from_engine, move.to_engine))
        assert after_s <= source_s * (1 - MIN_GAIN_SHARE) * (1 + 1e-9)


@given(fleets())
def test_order_of_engines_and_requests_does_not_matter(fleet: list[PackingEngine]) -> None:
    shuffled = [replace(one, requests=one.requests[::-1]) for one in fleet[::-1]]
    assert packing(*shuffled).moves == packing(*fleet).moves


@given(fleets())
def test_repeated_packing_converges(fleet: list[PackingEngine]) -> None:
    """After a few rounds with as many moves as requests, no move gains anything."""
    for _ in range(40):
        result = packing(*fleet)
        if not result.moves:
            return
        fleet = carried_out(fleet, result)
    pytest.fail("requests move back and forth")


def carried_out(fleet: list[PackingEngine], result: Packing) -> list[PackingEngine]:
    """Return the engines after the moves: a moved request runs if the free KV suffices, otherwise it waits."""
    engines = {engine.id: engine for engine in fleet}
    for move in result.moves:
        source, destination = engines[move.from_engine], engines[move.to_engine]
        (request,) = (request for request in source.requests if request.id == move.request)
        freed = request.context_tokens if request.state is RequestState.RUNNING else 0
        waits = any(other.state is RequestState.WAITING for other in destination.requests)
        fits = destination.kv_free_tokens >= request.context_tokens and not waits
        state = RequestState.RUNNING if fits else RequestState.WAITING
        engines[source.id] = replace(
            source,
            requests=tuple(other for other in source.requests if other is not request),
            kv_free_tokens=source.kv_free_tokens + freed,
        )
        engines[destination.id] = replace(
            destination,
            requests=(*destination.requests, replace(request, state=state)),
            kv_free_tokens=destination.kv_free_tokens - (request.context_tokens if fits else 0),
        )
    return [engines[engine.id] for engine in fleet]


def test_the_last_request_of_an_engine_stays_on_equal_engines() -> None:
    assert packing(engine("e0", packing_request("r0", 9000)), engine("e1")).moves == ()


def test_equal_requests_are_spread_evenly() -> None:
    fleet = [alike("e0", 12, 4000), alike("e1", 4, 4000)]
    counts = [len(one.requests) for one in carried_out(fleet, packing(*fleet, tolerance=0.0))]
    assert abs(counts[0] - counts[1]) <= 2


@pytest.mark.parametrize(("more", "moves"), [(-1e-6, True), (1e-6, False)])
def test_engine_within_the_tolerance_receives_no_moves(more: float, moves: bool) -> None:
    fleet = [alike("e0", 12, 4000), alike("e1", 4, 4000)]
    late_s, early_s = packing(*fleet).ends_before_s.values()
    assert bool(packing(*fleet, tolerance=1 - early_s / late_s + more).moves) == moves


def test_each_move_goes_from_the_last_ending_to_the_first_ending_engine() -> None:
    fleet = [alike("e0", 16, 4000), alike("e1", 14, 4000), alike("e2", 2, 4000)]
    moves = packing(*fleet, max_moves=6, tolerance=0.0).moves
    assert {move.from_engine for move in moves} == {"e0", "e1"}
    for place, move in enumerate(moves):
        so_far = packing(*fleet, max_moves=place, tolerance=0.0)
        assert so_far.moves == moves[:place]
        assert so_far.ends_after_s[move.from_engine] == so_far.makespan_after_s
        assert so_far.ends_after_s[move.to_engine] == min(so_far.ends_after_s.values())


def test_longest_request_ends_up_with_few_others() -> None:
    """Either its engine gives away the others, or it moves to an engine with little work, whichever is faster."""
    long = packing_request("long", 12_000, 6_000)
    crowd = [packing_request(f"r{i:02d}", 2_500, 2_000) for i in range(30)]
    result = packing(engine("e0", long, *crowd), *(alike(f"e{k}", 20, 1_500) for k in (1, 2, 3)))
    alone_s = packing(engine("e0", long)).makespan_before_s
    assert result.makespan_before_s > 1.04 * alone_s
    assert result.makespan_after_s < 1.02 * alone_s


def test_waiting_request_moves_to_an_engine_with_room() -> None:
    waiting = [packing_request(f"w{i}", 3_000, waits=True) for i in range(4)]
    full = engine("e0", *(packing_request(f"r{i}", 3_000, 5_000) for i in range(4)), *waiting, free=0)
    small = replace(full, configuration=replace(CONFIGURATION, kv_capacity_tokens=20_000))
    result = packing(small, alike("e1", 1, 3_000))
    assert any(move.state is RequestState.WAITING for move in result.moves)
    assert result.makespan_after_s < 0.7 * result.makespan_before_s


@pytest.mark.parametrize(("stuck", "moves"), [(SOURCES - 1, True), (SOURCES, False)])
def test_search_stops_after_several_sources_without_moves(stuck: int, moves: bool) -> None:
    """The engines that end last have only immovable requests."""
    held = [engine(f"s{i:02d}", packing_request(f"s{i:02d}", 20_000, movable=False)) for i in range(stuck)]
    assert bool(packing(*held, alike("e0", 12, 4_000), engine("e1")).moves) == moves


def test_a_slow_engine_is_relieved() -> None:
    slow = replace(alike("e0", 8, 2_000), slowdown=3.0)
    result = packing(slow, alike("e1", 8, 2_000))
    assert {(move.from_engine, move.to_engine) for move in result.moves} == {("e0", "e1")}


def test_move_with_a_prefill_above_its_gain_is_not_made() -> None:
    slow_prefill = replace(CONFIGURATION, prefill_tokens_per_s=50.0)
    fleet = [
        replace(one, configuration=slow_prefill)
        for one in (alike("e0", 12, 1_000, context=8_000), alike("e1", 4, 1_000, context=8_000))
    ]
    assert packing(*fleet).moves == ()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_remaining_tokens_are_rejected(bad: float) -> None:
    with pytest.raises(ValueError, match="remaining_tokens of request r0 must be > 0"):
        packing(engine("e0", packing_request("r0", bad)))


def test_fleet_without_engines_ends_immediately() -> None:
    assert (packing().makespan_before_s, packing().makespan_after_s) == (0.0, 0.0)


def test_negative_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="kv_free_tokens must be >= 0, got -1"):
        packing(engine("e0", free=-1))


@pytest.mark.parametrize(("state", "late_s"), [(RequestState.RUNNING, 5.0), (RequestState.WAITING, 0.0)])
def test_move_costs_its_prefill_and_pauses_a_running_request(state: RequestState, late_s: float) -> None:
    crowd = [replace(packing_request(f"r{i:02d}", 4_000), prompt_tokens=400, state=state) for i in range(12)]
    there = replace(packing_request("s", 4_000), prompt_tokens=400)
    fleet = [engine("e0", *crowd), engine("e1", there)]
    chosen = pack(fleet, max_moves=1, tolerance=TOLERANCE, move_fixed_s=5.0)
    assert [move.request for move in chosen.moves] == ["r00"]
    both_s = packing(engine("e1", there, crowd[0])).makespan_before_s
    prefill_s = crowd[0].context_tokens / CONFIGURATION.prefill_tokens_per_s
    assert chosen.ends_after_s[EngineId("e1")] == pytest.approx(both_s + prefill_s + late_s, rel=1e-9)


@pytest.mark.parametrize(("fixed_s", "moves"), [(0.0, True), (5.0, True), (60.0, False)])
@pytest.mark.parametrize("waits", [False, True])
def test_running_request_moves_only_if_the_gain_exceeds_its_pause(fixed_s: float, moves: bool, waits: bool) -> None:
    """Four long requests and an empty engine: three of them end 10 s sooner, and one alone ends 30 s sooner."""
    held = [packing_request(f"r{i}", 5000 - i, waits=waits and i == 3) for i in range(4)]
    slow = replace(CONFIGURATION, beta_s=0.002)
    fleet = [engine("e0", *held, configuration=slow), engine("e1", configuration=slow)]
    chosen = pack(fleet, max_moves=1, tolerance=TOLERANCE, move_fixed_s=fixed_s)
    waiting = [move.request for move in chosen.moves if move.state is RequestState.WAITING]
    if moves or waits:
        assert chosen.moves
        assert chosen.makespan_after_s < chosen.makespan_before_s
    else:
        assert chosen.moves == ()
    if not moves:
        assert len(waiting) == len(chosen.moves)  # a waiting request loses nothing


@given(fleets(), st.floats(0, 100))
def test_fixed_costs_of_simultaneous_moves_overlap(fleet: list[PackingEngine], fixed_s: float) -> None:
    """Compared with free moves, an engine ends at most one fixed part later, and only if running requests arrived."""
    chosen = pack(fleet, max_moves=5, tolerance=TOLERANCE, move_fixed_s=fixed_s)
    states = {move.to_engine: set[RequestState]() for move in chosen.moves}
    for move in chosen.moves:
        states[move.to_engine].add(move.state)
    bare = _carried_out_s(fleet, chosen)
    for name, end_s in chosen.ends_after_s.items():
        late_s = end_s - bare[name]
        assert -1e-6 <= late_s <= fixed_s * max(each.slowdown for each in fleet) + 1e-6
        if RequestState.RUNNING not in states.get(name, set()):
            assert late_s == pytest.approx(0.0, abs=1e-6)


def _carried_out_s(fleet: list[PackingEngine], chosen: Packing) -> dict[EngineId, float]:
    """Return the ends of the engines after the same moves without a fixed part."""
    loads = {each.id: _Load(each.worker, each.own, remaining_of(fleet)) for each in fleet}
    by_id = {request.id: request.view for each in fleet for request in each.requests}
    for move in chosen.moves:
        loads[move.from_engine].lose(by_id[move.request])
        loads[move.to_engine].gain(by_id[move.request])
    return {name: load.end_s for name, load in loads.items()}
