"""The decision where the next turn of a session runs, against brute force, and the table of sessions."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.gateway.routing import measured_line
from orchestrrl.gateway.routing.measured_line import REFIT_EVERY, MeasuredLine, fit
from orchestrrl.gateway.routing.sessions import (
    LEAST_GAIN,
    LOAD_FRACTION,
    EngineTimes,
    KeptContext,
    SessionOutcome,
    SessionTable,
    after_turn,
    engine_for,
    expected_s,
    times_of,
    typical_times,
    warm_tokens,
)
from orchestrrl.gateway.routing.strategies import (
    EngineLoad,
    RoutedRequest,
    RoutingPolicy,
    RoutingSnapshot,
    prefix_of,
    score,
    within,
)
from planner.model import EngineId

PREFILL_S, STEP_S = 0.001, 0.02


def line(base_s: float, slope_s: float) -> MeasuredLine:
    return MeasuredLine(fitted=(base_s, slope_s))


def load(name: str, running: int = 0, waiting: int = 0, **known: object) -> EngineLoad:
    tokens = {"running_tokens": running * 100, "waiting_tokens": waiting * 100}
    times = {"prefill_times": line(0.0, PREFILL_S), "step_times": line(STEP_S, 0.0)}
    return EngineLoad(EngineId(name), running, waiting, **{**tokens, **times, **known})  # type: ignore[arg-type]


def snapshot(loads: list[EngineLoad], context_tokens: int = 1000, slack: int = 8) -> RoutingSnapshot[EngineLoad]:
    return RoutingSnapshot(loads, RoutedRequest(context_tokens, session="s"), None, slack)


def kept(engine: EngineLoad, context_tokens: int = 1000, **fields: float) -> KeptContext:
    given = {"answer_tokens": 100, "ended_s": 0.0, "free_tokens": float("inf"), "computed_tokens": 0, **fields}
    return KeptContext(engine.cache, context_tokens, **given)  # type: ignore[arg-type]


# --- what is still cached ---


def cached_after(free_blocks: int, context: int, others: list[int]) -> int:
    """Return how many leading tokens of a context stay cached while other requests run one after the other. Blocks have
    one token. As in vLLM, blocks are reused in the order in which they were freed, and a request frees its last block
    first."""
    free = deque([("", 0)] * (free_blocks - context))
    free.extend(("s", index) for index in reversed(range(context)))
    for number, tokens in enumerate(others):
        taken = [free.popleft() for _ in range(tokens)]
        free.extend((f"other {number}", 0) for _ in taken)
    there = {index for name, index in free if name == "s"}
    return next((index for index in range(context) if index not in there), context)


@given(context=st.integers(1, 30), spare=st.integers(0, 30), data=st.data())
def test_warm_tokens_are_those_that_least_recently_freed_blocks_leave(
    context: int, spare: int, data: st.DataObject
) -> None:
    others = data.draw(st.lists(st.integers(1, context + spare), max_size=4))
    engine = load("a", computed_tokens=500 + sum(others))
    left = kept(engine, context, free_tokens=context + spare, computed_tokens=500)
    assert warm_tokens(left, engine) == cached_after(context + spare, context, others)


def test_kv_of_unknown_capacity_stays_warm_and_a_lost_cache_is_cold() -> None:
    engine = load("a", computed_tokens=10**9)
    assert warm_tokens(kept(engine), engine) == 1000
    assert warm_tokens(kept(engine), replace(engine, cache=-1)) == 0


# --- the engine of a turn ---

loads_of_a_fleet = st.lists(
    st.builds(
        load,
        name=st.sampled_from("abcdef"),
        running=st.integers(0, 20),
        waiting=st.integers(0, 20),
        max_sequences=st.sampled_from([0, 8, 16]),
        computed_tokens=st.integers(0, 3000),
        prefill_times=st.sampled_from([MeasuredLine(), line(0.1, 0.001), line(0.0, 0.01)]),
        step_times=st.sampled_from([MeasuredLine(), line(0.02, 0.0), line(0.01, 0.002)]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda load: load.id,
)


@given(
    loads=loads_of_a_fleet,
    home=st.integers(0, 4),
    context_tokens=st.integers(1, 20_000),
    kept_tokens=st.integers(1, 20_000),
    answer_tokens=st.integers(0, 500),
    free_tokens=st.sampled_from([float("inf"), 2000.0]),
)
def test_turn_goes_to_the_cheapest_engine_within_the_bound(
    loads: list[EngineLoad],
    home: int,
    context_tokens: int,
    kept_tokens: int,
    answer_tokens: int,
    free_tokens: float,
) -> None:
    there = loads[home % len(loads)]
    left = kept(there, kept_tokens, answer_tokens=answer_tokens, free_tokens=max(free_tokens, kept_tokens))
    given_loads = snapshot(loads, context_tokens)
    choice = engine_for(given_loads, left)
    assert engine_for(replace(given_loads, loads=loads[::-1]), left) == choice
    able = within(given_loads)
    assert choice.load in able or choice.outcome is SessionOutcome.COLD
    warm, typical = warm_tokens(left, there), typical_times(loads)
    if not warm:
        assert choice.outcome is SessionOutcome.COLD
        return
    if typical is None:
        assert (choice.load is there) == (there in able)
        return

    def cost_s(engine: EngineLoad) -> float:
        times = times_of(engine, typical)
        tokens = max(1, max(context_tokens, kept_tokens) - (warm if engine is there else 0))
        requests = engine.running + engine.waiting + 1
        batch = min(requests, engine.max_sequences or requests)
        step_s = times.step_s + batch * times.step_s_per_request
        own_s = (100 * engine.waiting + tokens) * times.prefill_s_per_token + answer_tokens * step_s * requests / batch
        each_s = tokens * times.prefill_s_per_token + answer_tokens * times.step_s_per_request
        return own_s + engine.running * each_s

    costs = {engine.id: cost_s(engine) for engine in able}
    least_s = min(costs.values())
    if choice.outcome is SessionOutcome.WARM:
        assert choice.load is there
        assert least_s >= (1 - LEAST_GAIN) * costs[there.id] - 1e-9
    else:
        assert choice.outcome is SessionOutcome.MOVED
        assert costs[choice.load.id] == pytest.approx(least_s)
        assert there not in able or least_s < (1 - LEAST_GAIN) * costs[there.id] + 1e-9


def test_turn_stays_until_the_queue_costs_more_than_the_prefill_elsewhere() -> None:
    # The prefill of 10,000 tokens elsewhere takes 10 s, and that of each waiting request takes 0.1 s. The answer takes
    # 2 s, and another engine must be faster by a tenth.
    outcomes = []
    for waiting in (0, 50, 110, 120):
        home, other = load("home", waiting=waiting), load("other")
        outcomes.append(engine_for(snapshot([home, other], 10_000, slack=200), kept(home, 10_000)).outcome)
    assert outcomes == ["warm", "warm", "warm", "moved"]


def test_turn_leaves_an_overloaded_engine_even_without_measurements() -> None:
    home, other = (load(name, prefill_times=MeasuredLine()) for name in ("home", "other"))
    assert engine_for(snapshot([home, other]), kept(home)).outcome is SessionOutcome.WARM
    choice = engine_for(snapshot([replace(home, running=30), other]), kept(home))
    assert (choice.load, choice.outcome) == (other, SessionOutcome.MOVED)


def test_saved_kv_lets_a_turn_leave_earlier() -> None:
    # Elsewhere, the prefill takes 10 s and the load 1 s.
    home, other = load("home", waiting=60), load("other")
    given_loads, left = snapshot([home, other], 10_000, slack=200), kept(home, 10_000)
    assert engine_for(given_loads, left).load is home
    assert engine_for(given_loads, left, {other.cache}).load is other
    assert engine_for(given_loads, left, {home.cache}).load is home


@given(
    context_tokens=st.integers(1, 100_000),
    elsewhere=st.floats(0, 1),
    prefill_s=st.floats(1e-6, 1e-2),
    load_s=st.floats(0, 1),
    per_token_s=st.floats(0, 1e-2),
)
def test_kv_is_saved_only_if_the_expected_gain_exceeds_the_cost(
    context_tokens: int, elsewhere: float, prefill_s: float, load_s: float, per_token_s: float
) -> None:
    costs = after_turn(context_tokens, elsewhere, EngineTimes(prefill_s, load_s, per_token_s, 0.0, 0.0))
    load_s, prefill_s = load_s + context_tokens * per_token_s, context_tokens * prefill_s
    # Elsewhere, the next turn loads the KV or prefills the context, whichever is faster.
    gain_s = elsewhere * (prefill_s - min(load_s, prefill_s))
    assert costs.kept_s <= costs.dropped_s
    if abs(gain_s - load_s) > 1e-9 * (gain_s + load_s):
        assert costs.offload == (gain_s > load_s)
    if elsewhere == 0:
        assert not costs.offload


def test_delay_of_running_requests_counts() -> None:
    times = EngineTimes(0.001, 0.3, 0.0001, 0.02, 0.002)
    # 100 tokens to prefill and 10 to decode, beside 3 running and 1 waiting request with 100 tokens.
    own_s = 0.1 + 0.1 + 10 * (0.02 + 5 * 0.002)
    assert expected_s(load("a", 3, 1), times, 100, 10) == pytest.approx(own_s + 3 * (0.1 + 10 * 0.002))
    # With 4 sequence slots, 5 requests take 5/4 as long to decode.
    full_s = 0.1 + 0.1 + 10 * (0.02 + 4 * 0.002) * 5 / 4
    assert expected_s(load("a", 3, 1, max_sequences=4), times, 100, 10) == pytest.approx(full_s + 3 * (0.1 + 0.02))
    # A load of 2,000 tokens takes 0.5 s, and does not delay the running requests.
    loaded_s = expected_s(load("a", 3, 1), times, 100, 10, 2000)
    assert loaded_s == pytest.approx(own_s + 0.5 + 3 * (0.1 + 10 * 0.002))


@given(names=st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True), session=st.text(min_size=1))
def test_gateways_choose_the_same_engine_for_a_new_session(names: list[str], session: str) -> None:
    loads = [load(name) for name in names]
    newcomer = RoutedRequest(100, session=session)
    choice = engine_for(RoutingSnapshot(loads, newcomer, None, 8), None)
    assert choice.load.id == max(names, key=lambda name: score(prefix_of(session, {}), name))
    by_prefix = RoutingSnapshot(loads, replace(newcomer, prefix=77), None, 8)
    assert engine_for(by_prefix, None).load.id == max(names, key=lambda name: score(77, name))


def test_preferred_pool_precedes_a_warm_engine() -> None:
    inside, home = load("inside", pool="h20"), load("home")
    routing = RoutingPolicy(affinity={"math": "h20"})
    given_loads = routing.snapshot([inside, home], RoutedRequest(1000, tag="math", session="s"))
    assert engine_for(given_loads, kept(home)).load is inside


# --- measurements ---


@given(
    base_s=st.floats(0, 1),
    slope_s=st.floats(1e-5, 1e-2),
    counts=st.lists(st.integers(1, 20_000), min_size=7, max_size=30, unique=True),
)
def test_line_is_found_if_the_counts_differ(base_s: float, slope_s: float, counts: list[int]) -> None:
    found = fit(tuple((float(count), base_s + slope_s * count) for count in counts), through_zero=False)
    if max(counts) >= 2 * min(counts):
        assert found == pytest.approx((base_s, slope_s), rel=1e-6, abs=1e-6)
    else:
        assert found[1] == 0.0


@given(disturbed=st.sets(st.integers(0, 19), max_size=2), seconds=st.sampled_from([0.0, 1e6]))
def test_line_ignores_a_minority_of_disturbed_samples(disturbed: set[int], seconds: float) -> None:
    exact = [0.5 + 0.001 * 100 * number for number in range(1, 21)]
    samples = [(100 * (index + 1), seconds if index in disturbed else exact[index]) for index in range(20)]
    assert fit(tuple(samples), through_zero=False) == pytest.approx((0.5, 0.001), rel=1e-6)


def test_line_without_different_counts_is_flat_or_proportional() -> None:
    for through_zero, expected in ((True, (0.0, 0.01)), (False, (1.0, 0.0))):
        measured = MeasuredLine(through_zero=through_zero)
        for _ in range(REFIT_EVERY):
            assert measured.fitted is None
            measured.add(100, -1.0)
            measured.add(100, 1.0)
        assert measured.fitted == expected


def test_newest_samples_replace_the_oldest() -> None:
    measured = MeasuredLine()
    for _ in range(40):
        measured.add(10, 1.0)
    for _ in range(40):
        measured.add(10, 2.0)
    assert measured.fitted == (2.0, 0.0)


def test_engines_without_measurements_are_taken_to_be_typical() -> None:
    known = [load("a"), load("b", prefill_times=line(1.0, 0.003), step_times=MeasuredLine())]
    fresh = load("c", prefill_times=MeasuredLine(), step_times=MeasuredLine())
    typical = typical_times([*known, fresh])
    assert typical == EngineTimes(0.002, 0.0, LOAD_FRACTION * 0.002, STEP_S, 0.0)
    assert times_of(fresh, typical) == typical
    assert times_of(known[1], typical) == replace(typical, prefill_s_per_token=0.003)
    loads = replace(fresh, load_times=line(0.1, 0.00001))
    assert typical_times([*known, loads]) == replace(typical, load_s=0.1, load_s_per_token=0.00001)
    assert typical_times([fresh]) is None


# --- the table ---


def test_session_is_forgotten_after_its_ttl() -> None:
    table, engine = SessionTable(60.0), load("a")
    table.keep("s", engine, 500, 50, 10.0)
    table.keep("t", engine, 500, 50, 30.0)
    table.keep("s", engine, 900, 50, 40.0)
    assert table.get("s", 99.9) == kept(engine, 900, answer_tokens=50, ended_s=40.0)
    assert table.known(90.0) == 1
    assert table.get("s", 100.0) is None


def test_least_recently_used_sessions_are_forgotten_first() -> None:
    table, engine = SessionTable(60.0, most=2), load("a")
    for now_s, name in enumerate("abac"):
        table.keep(name, engine, 500, 50, float(now_s))
    assert [name for name in "abc" if table.get(name, 5.0)] == ["a", "c"]


def test_table_records_what_the_engine_could_cache() -> None:
    table = SessionTable(60.0)
    engine = load("a", kv_capacity_tokens=10_000, kv_free_tokens=8_000, computed_tokens=70)
    table.keep("s", engine, 500, 40, 0.0)
    table.keep("s", engine, 700, None, 1.0)  # a turn that still runs
    found = table.get("s", 1.0)
    assert found == KeptContext(engine.cache, 700, 40, 1.0, 8_000, 70)
    table.keep("s", replace(engine, kv_free_tokens=-50), 700, 60, 2.0)  # a late report of the engine
    assert table.get("s", 2.0) == KeptContext(engine.cache, 700, 60, 2.0, 700, 70)


def test_turns_are_counted_by_outcome() -> None:
    table, home, other = SessionTable(60.0), load("home"), load("other")
    assert table.begin("s", home, [home, other], 0.0, first=True) == 0
    table.keep("s", home, 500, 50, 0.0)
    assert table.begin("s", home, [home, other], 1.0, first=True) == 500
    assert table.begin("s", home, [home, other], 1.0, first=False) == 500  # a later attempt
    assert table.begin("s", other, [home, other], 2.0, first=True) == 0
    assert table.begin("s", other, [other], 2.0, first=True) == 0
    assert table.turns == dict.fromkeys(SessionOutcome, 1)
    assert table.warm_tokens_total == 500
    assert table.elsewhere == 0.0  # too few turns
    table.turns[SessionOutcome.WARM] = 7
    assert table.elsewhere == 2 / 9


def test_line_is_fitted_only_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []

    def counted(samples: tuple[tuple[float, float], ...], *, through_zero: bool) -> tuple[float, float]:
        fits.append(len(samples))
        return fit(samples, through_zero=through_zero)

    monkeypatch.setattr(measured_line, "fit", counted)
    measured = MeasuredLine()
    for count in range(1, 21):
        measured.add(count, 2.0 * count)
    assert not fits
    assert measured.fitted == measured.fitted == (0.0, 2.0)
    assert fits == [20]
