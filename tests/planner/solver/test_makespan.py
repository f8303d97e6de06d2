"""Tests of the makespan solver's parts (admission, bounds, cuts, layouts, search) and of guarantees of `solve` beyond
the contract's tests."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from decode_oracle import step_by_step_s
from hypothesis import given
from hypothesis import strategies as st
from planner_builders import RemainingWork, configuration

from planner.model import Configuration, EngineId, GpuId, RequestId
from planner.solver.admission_order import TURNS, admit, least, orders
from planner.solver.band import balanced, violation
from planner.solver.bound import lower_bound_s, room_shares
from planner.solver.choose import LEAST, chosen, moves, settled
from planner.solver.columns import ProblemColumns, columns
from planner.solver.cut import RequestCut, RequestCutter
from planner.solver.dual import SAMPLE, tightened_s
from planner.solver.evaluate import FleetPlacement, SolverFleet, place
from planner.solver.layout import in_a_row, lay_out
from planner.solver.makespan import as_placed, lower_bound, solve
from planner.solver.packed import match, packed, soonest_cut
from planner.solver.problem import (
    NEW,
    NOWHERE,
    RUNNING,
    WAITING,
    CurrentInstance,
    Infeasible,
    KvBalance,
    KvTransferCost,
    MakespanProblem,
    ProblemRequests,
)
from planner.solver.search import AdmissionOrders, PlacementSearch, SearchBudget
from planner.solver.small import CLOSELY, best_of_all, fleets
from planner.solver.spread import MANY, least_loaded, least_s, loads, one_by_one
from planner.solver.waves import Waves, sooner
from planner.solver.whole import raised_s

TP1 = configuration("tp1", 1, alpha_s=0.024, beta_s=8.7e-5, gamma_s=8.2e-8, capacity=200_000, switch_s=1.6)
TP2 = configuration("tp2", 2, alpha_s=0.0184, capacity=580_000, switch_s=1.7)
TP8 = configuration("tp8", 8, alpha_s=0.0143, gamma_s=1e-8, capacity=2_780_000, slots=1024, switch_s=2.3)
BUSY = replace(TP2, beta_s=0.05)  # the work of each request matters as much as the longest request
SEEDS = st.integers(0, 2**32 - 1)


def problem(
    configurations: Sequence[Configuration],
    lengths: Sequence[tuple[int, int]],  # context, remaining
    *,
    gpus: int = 16,
    per_node: int = 8,
    current: Sequence[CurrentInstance] = (),
    places: Sequence[int] | None = None,
    states: Sequence[int] | None = None,
    epsilon_s: float = 0.5,
    work_budget: int | None = None,
) -> MakespanProblem:
    count = len(lengths)
    return MakespanProblem(
        gpus_count=gpus,
        per_node=per_node,
        configurations=tuple(configurations),
        transfer=KvTransferCost(200.0, 1600.0, 0.002, kv_bytes_per_token=196_608.0),
        current=tuple(current),
        requests=ProblemRequests(
            ids=tuple(RequestId(f"r{place}") for place in range(count)),
            context_tokens=np.array([context for context, _ in lengths], dtype=np.int64),
            remaining_tokens=np.array([remaining for _, remaining in lengths], dtype=np.int64),
            instance=np.array(places if places is not None else [NOWHERE] * count, dtype=np.int64),
            state=np.array(states if states is not None else [NEW] * count, dtype=np.int8),
        ),
        epsilon_s=epsilon_s,
        work_budget=work_budget,
    )


def current_fleet(table: ProblemColumns) -> SolverFleet:
    return SolverFleet.of(table, range(len(table.problem.current)))


def heavy_tailed(seed: int, count: int, mean: float = 7.2) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    remaining = np.clip(rng.lognormal(mean, 1.1, count), 1, 32_768).astype(int).tolist()
    return list(zip(rng.integers(100, 3000, count).tolist(), remaining, strict=True))


def fleet(kind: Configuration, gpus: int) -> list[CurrentInstance]:
    return [
        CurrentInstance(EngineId(f"i{place}"), kind.id, tuple(GpuId(gpu) for gpu in range(first, first + kind.gpus)))
        for place, first in enumerate(range(0, gpus, kind.gpus))
    ]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=12),
    st.sampled_from([40, 60, 100]),
    st.integers(1, 6),
)
def test_admit_matches_decoding_step_by_step(held: list[tuple[int, int]], capacity: int, slots: int) -> None:
    counted = configuration(alpha_s=1.0, beta_s=0.0, gamma_s=0.0, capacity=capacity, slots=slots)
    requests = [RemainingWork(*each) for each in held]
    iterations = admit(
        [each.remaining_tokens for each in requests], [each.footprint_tokens for each in requests], capacity, slots
    )
    assert iterations == step_by_step_s(counted, requests)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=40),
    st.sampled_from([40, 60, 100]),
    st.integers(1, 6),
)
def test_admission_orders_lie_between_lower_bound_and_claim(
    held: list[tuple[int, int]], capacity: int, slots: int
) -> None:
    """The claim is a schedule without blocking; first come, first served in its order is not slower."""
    lefts = [remaining for _, remaining in held]
    rooms = [context + remaining for context, remaining in held]
    tries = list(orders(lefts, rooms, capacity, slots))
    assert len(tries) == 2 * (TURNS + 1)  # from two starts
    for told, order in tries:
        assert sorted(order) == list(range(len(held)))
        taken = admit([lefts[each] for each in order], [rooms[each] for each in order], capacity, slots)
        assert least(lefts, rooms, capacity, slots) <= taken <= told


def test_schedule_without_blocking_starts_requests_that_fit() -> None:
    """Longest first, the second waits for the first and blocks the small ones, which fit together with the first."""
    lefts, rooms, capacity = [10, 9, 5, 4], [60, 90, 40, 40], 100
    assert admit(lefts, rooms, capacity, 4) == 24
    assert min(told for told, _ in orders(lefts, rooms, capacity, 4)) == 19


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50)), min_size=1, max_size=8),
    st.sampled_from([100, 120, 150]),
)
def test_requests_that_run_at_once_share_the_room_at_most_once(held: list[tuple[int, int]], capacity: int) -> None:
    lengths = [(context, remaining) for context, remaining in held if context + remaining <= capacity]
    kind = configuration("tp1", 1, capacity=capacity)
    table = columns(problem([kind], lengths))
    for shares in room_shares(table, 0, np.arange(len(lengths))):
        for size in range(len(lengths) + 1):
            for some in combinations(range(len(lengths)), size):
                if table.footprint[list(some)].sum() <= capacity:
                    assert shares[list(some)].sum() <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_levelling_keeps_every_request_and_ends_no_later(seed: int) -> None:
    """The requests need twice the available KV room."""
    kind = configuration("tp2", 2, alpha_s=0.0184, capacity=40_000, switch_s=1.7)
    table = columns(problem([kind], heavy_tailed(seed, 200)))
    fleet_of_kind = in_a_row(table, [], 0, 8)
    dealt = np.arange(200) % 8
    before = place(table, fleet_of_kind, dealt)
    (after,) = sooner(table, [before], 0.0, SearchBudget(100_000))
    soon_enough = Waves(table, before, SearchBudget(100_000))
    soon_enough.level(before.makespan_s)
    assert soon_enough.placement().order.tolist() == before.order.tolist()
    assert sorted(after.order.tolist()) == list(range(200))
    assert after.makespan_s < before.makespan_s


def test_order_without_blocking_is_used_if_requests_wait_for_room() -> None:
    """A single instance admits the requests of the test above."""
    lefts, rooms = [10, 9, 5, 4], [60, 90, 40, 40]
    kind = configuration("tp2", 2, alpha_s=0.5, capacity=100, slots=4)
    table = columns(problem([kind], [(room - left, left) for left, room in zip(lefts, rooms, strict=True)], gpus=2))
    before = place(table, in_a_row(table, [], 0, 1), np.zeros(4, dtype=np.int64))
    (after,) = sooner(table, [before], 0.0, SearchBudget(1000))
    assert before.makespan_s - after.makespan_s == pytest.approx(0.5 * (24 - 19))
    assert sooner(table, [before], 0.0, SearchBudget(0)) == []
    alone = Waves(table, before, SearchBudget(1000))
    alone.reorder(0.0)
    assert alone.makespan_s == pytest.approx(after.makespan_s)


def test_a_request_too_large_is_never_admitted() -> None:
    assert admit([1, 1], [5, 11], 10, 4) == float("inf")


@given(SEEDS, st.sampled_from([0.05, 0.2, 1.0]), st.sampled_from([4, 1024]))
def test_both_bounds_are_below_the_makespan_found(seed: int, room: float, slots: int) -> None:
    kinds = [
        configuration(
            each.id,
            each.gpus,
            alpha_s=each.alpha_s,
            beta_s=each.beta_s,
            gamma_s=each.gamma_s,
            capacity=max(40_000, int(each.kv_capacity_tokens * room)),
            slots=slots,
            switch_s=each.switch_s,
        )
        for each in (TP1, TP2, TP8)
    ]
    given_problem = problem(kinds, heavy_tailed(seed, 60), work_budget=20_000)
    table = columns(given_problem)
    solution = solve(given_problem)
    closed_s = lower_bound_s(table)
    tight_s = tightened_s(table, closed_s, solution.makespan_s)
    assert closed_s <= tight_s <= solution.makespan_s
    assert solution.lower_bound_s <= solution.makespan_s


@given(SEEDS, st.integers(1, 60), st.sampled_from([4, 8, 16]), st.booleans())
def test_whole_instances_take_at_least_the_raised_bound(seed: int, count: int, gpus: int, running: bool) -> None:
    current = fleet(TP2, gpus) if running else []
    places = [place % len(current) for place in range(count)] if running else None
    states = [RUNNING if place % 3 else WAITING for place in range(count)] if running else None
    given_problem = problem(
        [TP1, TP2, TP8] if gpus >= 8 else [TP1, TP2],
        heavy_tailed(seed, count),
        gpus=gpus,
        current=current,
        places=places,
        states=states,
    )
    table = columns(given_problem)
    closed_s = lower_bound_s(table)
    solution = solve(given_problem)
    for tight in (False, True):
        assert closed_s <= raised_s(table, closed_s, 1e9, tight) <= solution.makespan_s


def test_raised_bound_accounts_for_whole_instances() -> None:
    """Three equal requests on two engines are 1.5 each on average, but one engine has two."""
    kind = configuration("tp8", 8, alpha_s=0.0, beta_s=0.01, gamma_s=0.0, switch_s=0.0)
    table = columns(problem([kind], [(0, 1000)] * 3))
    closed_s = lower_bound_s(table)
    assert closed_s == pytest.approx(15.0, rel=1e-3)
    assert raised_s(table, closed_s, 20.0, tight=False) == pytest.approx(15.0, rel=1e-3)  # work can be split
    kind = configuration("tp8", 8, alpha_s=0.01, beta_s=0.001, gamma_s=0.0, switch_s=0.0)
    table = columns(problem([kind], [(0, 1000)] * 2 + [(0, 100)] * 200))
    assert lower_bound_s(table) == pytest.approx(14.9, rel=0.05)
    assert raised_s(table, lower_bound_s(table), 40.0, tight=False) > 1.01 * lower_bound_s(table)


@pytest.mark.parametrize(("count", "scale"), [(640, 1.0), (640, 1e-3), (2 * SAMPLE, 1.0)])
@pytest.mark.parametrize(("slots", "capacity"), [(8, 1_000_000), (256, 8 * 1100)])
def test_bound_rises_if_slots_or_room_are_short(slots: int, capacity: int, count: int, scale: float) -> None:
    """Eight requests run at a time, so generating all tokens takes far longer than the longest request alone."""
    kind = configuration(
        "tp2", 2, alpha_s=0.02 * scale, beta_s=1e-6 * scale, gamma_s=0.0, capacity=capacity, slots=slots, switch_s=0.0
    )
    table = columns(problem([kind], [(100, 1000)] * count))
    closed_s = lower_bound_s(table)
    assert closed_s == pytest.approx((20.0 + 0.001 * count / 8) * scale, rel=0.01)
    for refused_s in (
        tightened_s(table, closed_s, 2000.0 * scale),
        raised_s(table, closed_s, 2000.0 * scale, tight=True),
    ):
        assert refused_s == pytest.approx(0.02 * 1000 * count / 8 / 8 * scale, rel=0.02)


def test_requests_with_little_work_count_if_slots_are_short() -> None:
    """Half of the requests have nearly all the work, but all of them take slots."""
    kind = configuration("tp2", 2, alpha_s=0.02, beta_s=1e-6, gamma_s=1e-8, slots=8, switch_s=0.0)
    table = columns(problem([kind], [(0, 1000), (100_000, 1000)] * 320))
    in_turn = place(table, in_a_row(table, [], 0, 8), np.arange(640) // 2 % 8)
    assert 0.97 * in_turn.makespan_s < raised_s(table, lower_bound_s(table), 2000.0, tight=True) <= in_turn.makespan_s


def test_bound_from_a_sample_is_checked_with_all_requests() -> None:
    """The sample contains every other request, and these need much room, while the others need almost none."""
    kind = configuration("tp2", 2, alpha_s=0.02, beta_s=1e-6, gamma_s=0.0, capacity=12_000, slots=256, switch_s=0.0)
    lengths = [(2000 * (place % 2), 1000) for place in range(2 * SAMPLE)]
    table = columns(problem([kind], lengths))
    in_turn = place(table, in_a_row(table, [], 0, 8), np.arange(2 * SAMPLE) // 2 % 8)
    assert lower_bound_s(table) <= tightened_s(table, lower_bound_s(table), 1e4) <= in_turn.makespan_s


@given(SEEDS, st.integers(0, 60))
def test_cuts_cover_every_request_once(seed: int, count: int) -> None:
    table = columns(problem([TP1, TP2, TP8], heavy_tailed(seed, count)))
    cuts = RequestCutter(table).cut(lower_bound_s(table) * 1.5 + 1)
    assert cuts is not None
    blocks = sorted(block for cut in cuts for block in cut.blocks)
    assert [place for first, end in blocks for place in range(first, end)] == list(range(count))


@given(st.integers(1, 40), st.sampled_from([2, 4, 8]), st.lists(st.sampled_from([0, 1, 2]), max_size=12))
def test_a_layout_keeps_to_the_nodes(gpus: int, per_node: int, wanted: list[int]) -> None:
    kinds = [TP1, TP2, configuration("wide", 2 * per_node)]
    table = columns(problem(kinds, [], gpus=gpus, per_node=per_node))
    fleet = lay_out(table, [], wanted)
    if fleet is None:
        assert sum(kinds[each].gpus for each in wanted) > gpus - (gpus % per_node if 2 in wanted else 0) - per_node
        return
    assert fleet.configuration.tolist() == wanted
    used = [gpu for held in fleet.gpus for gpu in held]
    assert len(set(used)) == len(used)
    assert all(0 <= gpu < gpus for gpu in used)
    for each, held in zip(wanted, fleet.gpus, strict=True):
        assert len(held) == kinds[each].gpus
        assert len({gpu // per_node for gpu in held}) == max(1, len(held) // per_node)


@given(st.integers(1, 40), st.sampled_from([2, 4, 8]), st.sampled_from([0, 1, 2]), st.integers(0, 12))
def test_in_a_row_fills_all_free_gpus(gpus: int, per_node: int, wanted: int, most: int) -> None:
    kinds = [TP1, TP2, configuration("wide", 2 * per_node)]
    table = columns(problem(kinds, [], gpus=gpus, per_node=per_node))
    row = in_a_row(table, [], wanted, most)
    assert len(row) == min(most, int(table.placeable[wanted]))
    assert list(row.gpus) == sorted(row.gpus)
    assert len({gpu for held in row.gpus for gpu in held}) == len(row) * kinds[wanted].gpus
    assert all(len({gpu // per_node for gpu in held}) == max(1, len(held) // per_node) for held in row.gpus)


def spread_s(asked: MakespanProblem, kind: int) -> float:
    """Return the seconds of a fleet of one configuration, with the longest requests first onto the least loaded."""
    table = columns(asked)
    fleet = in_a_row(table, [], kind, int(table.placeable[kind]))
    load, first = loads(table, kind)[0]
    return place(table, fleet, least_loaded(table, kind, len(fleet), load, first)).makespan_s


def test_the_tail_is_packed_not_spread() -> None:
    """All instances are of one kind, so the gain over longest first onto the least loaded comes from packing."""
    asked = problem([TP2], heavy_tailed(1, 2048, 8.6), gpus=128)
    assert solve(asked).makespan_s < 0.95 * spread_s(asked, 0)


@pytest.mark.parametrize("mean", [5.5, 7.2, 8.6])
def test_a_large_step_is_within_four_percent_of_its_bound(mean: float) -> None:
    solution = solve(problem([TP1, TP2, TP8], heavy_tailed(1, 8192, mean), gpus=512))
    assert solution.gap is not None
    assert solution.gap <= 0.04


def test_skewed_fleet_with_expensive_starts_is_rebalanced() -> None:
    dear = configuration("tp2", 2, switch_s=1e5)
    current = fleet(dear, 16)
    lengths = heavy_tailed(3, 64)
    stuck = problem([dear], lengths, current=current, places=[0] * 64, states=[RUNNING] * 64)
    solution = solve(stuck)
    assert solution.decision == "rebalance"
    assert [placed.id for placed in solution.instances] == [instance.id for instance in current]
    assert all(placed.kept for placed in solution.instances)
    assert solution.makespan_s < 0.96 * (solution.current_makespan_s or 0)


def test_of_equal_requests_only_the_surplus_moves() -> None:
    current = fleet(TP2, 64)
    places = [place % 16 if place % 3 else place % 32 for place in range(1024)]
    solution = solve(
        problem(
            [TP1, TP2, TP8], [(1000, 3000)] * 1024, gpus=64, current=current, places=places, states=[RUNNING] * 1024
        )
    )
    assert solution.decision == "rebalance"
    assert len(solution.migrations) == sum(max(0, places.count(place) - 32) for place in range(32))


@given(SEEDS, st.integers(1, 80), st.sampled_from([0.0, 0.01, 0.2]))
def test_settling_moves_fewer_and_ends_in_time(seed: int, count: int, slack: float) -> None:
    rng = np.random.default_rng(seed)
    kept = problem(
        [TP1, TP2, TP8],
        heavy_tailed(seed, count),
        current=fleet(TP2, 16),
        places=rng.integers(0, 8, count).tolist(),
        states=rng.integers(0, 2, count).tolist(),
    )
    table = columns(kept)
    before = place(table, current_fleet(table), rng.integers(0, 8, count))
    limit_s = before.makespan_s * (1 + slack)
    after = settled(table, before, limit_s)
    assert sorted(after.order.tolist()) == list(range(count))
    assert after.makespan_s <= limit_s
    assert moves(table, after) <= moves(table, before)
    if slack == 0.0 and moves(table, before) == 0:
        assert after is before


@given(SEEDS, st.integers(1, 60), st.sampled_from([0.0, 0.01, 0.05]), st.sampled_from([0.0, 0.02]))
def test_balanced_reduces_the_violation_within_the_limit(seed: int, count: int, mu: float, delta: float) -> None:
    rng = np.random.default_rng(seed)
    given_problem = problem([TP1, TP2, TP8], heavy_tailed(seed, count), current=fleet(TP2, 16))
    table = columns(replace(given_problem, kv_balance=KvBalance(mu, delta)))
    before = place(table, current_fleet(table), rng.integers(0, 8, count))
    limit_s = before.makespan_s * 1.05
    after = balanced(table, before, limit_s)
    assert sorted(after.order.tolist()) == list(range(count))
    assert after is before or violation(table, after) < violation(table, before)
    assert after.makespan_s <= limit_s


def test_new_instances_avoid_the_names_of_current_ones() -> None:
    current = [CurrentInstance(EngineId("new0"), TP2.id, (GpuId(4), GpuId(5)))]
    solution = solve(problem([TP2, TP8], heavy_tailed(1, 40), current=current, places=[0] * 40, states=[WAITING] * 40))
    names = [placed.id for placed in solution.instances]
    assert len(set(names)) == len(names)
    assert all(placed.kept == (placed.id == "new0") for placed in solution.instances)


def test_infeasible_reports_the_missing_amount() -> None:
    with pytest.raises(Infeasible) as missed:
        solve(problem([TP1], [(150_000, 60_000)]))
    assert (missed.value.needed, missed.value.available, missed.value.unit) == (210_000, 200_000, "tokens")
    with pytest.raises(Infeasible) as missed:
        solve(problem([TP8], [(1, 1)], gpus=7))
    assert (missed.value.needed, missed.value.available, missed.value.unit) == (8, 7, "GPUs")


def test_the_helpers_agree_with_the_solution() -> None:
    current = fleet(TP2, 16)
    given_problem = problem(
        [TP1, TP2, TP8],
        heavy_tailed(5, 64),
        current=current,
        places=[place % 8 for place in range(64)],
        states=[RUNNING] * 64,
    )
    solution = solve(given_problem)
    assert as_placed(columns(given_problem)).makespan_s == solution.current_makespan_s
    assert lower_bound(given_problem) <= solution.lower_bound_s
    assert solution.makespan_s <= min(spread_s(given_problem, kind) for kind in range(3))


def test_stopped_search_still_returns_a_solution() -> None:
    given_problem = problem([TP1, TP2, TP8], heavy_tailed(5, 64))
    stopped = solve(given_problem, stop=lambda: True)
    assert stopped.makespan_s >= solve(given_problem).makespan_s
    assert sum(len(placed.requests) for placed in stopped.instances) == 64


def dealt(
    seed: int, count: int, *, kind: Configuration = TP2, states: Sequence[int] = (RUNNING,), two_lengths: bool = False
) -> tuple[ProblemColumns, FleetPlacement]:
    """Return requests spread over four instances and a random placement of them. With `two_lengths`, moves are free."""
    rng = np.random.default_rng(seed)
    given_problem = problem(
        [kind],
        [(1000, 1000 + 200 * (n % 2)) for n in range(count)] if two_lengths else heavy_tailed(seed, count),
        gpus=4 * kind.gpus,
        current=fleet(kind, 4 * kind.gpus),
        places=rng.integers(0, 4, count).tolist(),
        states=rng.choice(states, count).tolist(),
    )
    if two_lengths:
        given_problem = replace(given_problem, transfer=KvTransferCost(1e12, 1e12, 0.0, kv_bytes_per_token=196_608.0))
    table = columns(given_problem)
    return table, place(table, current_fleet(table), rng.integers(0, 4, count))


# --- local search


def improved(table: ProblemColumns, start: FleetPlacement, work: SearchBudget) -> FleetPlacement:
    search = PlacementSearch(table, start.fleet, AdmissionOrders(table, work))
    search.take(start.assigned())
    search.improve()
    return search.placement()


@given(SEEDS, st.integers(1, 24))
def test_no_move_improves_an_improved_placement(seed: int, count: int) -> None:
    table, start = dealt(seed, count, kind=BUSY, states=[RUNNING, WAITING])
    found = improved(table, start, SearchBudget(10**9))
    assert sorted(found.order.tolist()) == list(range(count))
    assert found.makespan_s <= start.makespan_s
    at, last = found.assigned(), int(found.finish_s.argmax())
    for request, instance in product(np.flatnonzero(at == last).tolist(), range(4)):
        trial = at.copy()
        trial[request] = instance
        assert place(table, found.fleet, trial).makespan_s >= found.makespan_s * (1 - 1e-9)


def test_improve_ends_when_the_budget_is_spent() -> None:
    table, start = dealt(1, 40)
    barely, much = (improved(table, start, SearchBudget(left)) for left in (1, 10**6))
    assert much.makespan_s < barely.makespan_s == start.makespan_s


@pytest.mark.parametrize("fresh", [False, True])
@given(seed=SEEDS, count=st.integers(1, 30), share=st.floats(0.5, 1.2))
def test_insert_fills_greedily_or_within_a_given_time(fresh: bool, seed: int, count: int, share: float) -> None:
    """Each request goes where it ends soonest, longest first; with a given time, none ends later or nothing changes."""
    table = columns(problem([TP2], heavy_tailed(seed, count), gpus=8)) if fresh else dealt(seed, count)[0]
    instances = in_a_row(table, [], 0, 4)
    search = PlacementSearch(table, instances, AdmissionOrders(table, SearchBudget(10**9)))
    assert search.insert()
    ends_s, held = [0.0] * 4, [0] * 4
    for request in table.longest_first.tolist():
        moved_s = np.where(table.source[request] == np.arange(4), 0.0, table.move_s(np.full(4, request), 0, 0))
        costs_s = table.work_s[0, request] + moved_s
        first_s = (TP2.switch_s if fresh else 0.0) + TP2.alpha_s * table.remaining[request]
        then_s = [ends_s[each] + costs_s[each] + (0.0 if held[each] else first_s) for each in range(4)]
        best = then_s.index(min(then_s))
        ends_s[best], held[best] = then_s[best], held[best] + 1
    assert search.finish_s == pytest.approx(ends_s)
    assert search.placement().makespan_s == pytest.approx(max(ends_s))
    until_s = share * search.makespan_s
    before = [list(each) for each in search.held]
    if search.insert(until_s):
        assert search.placement().makespan_s <= until_s * (1 + 1e-9)
        assert sorted(request for each in search.held for request in each) == list(range(count))
    else:
        assert share < 1 + 1e-9
        assert search.held == before


def test_shake_escapes_a_local_optimum_deterministically() -> None:
    table, start = dealt(1, 24, kind=BUSY)
    found = []
    for rounds in (0, 200, 200):
        search = PlacementSearch(table, start.fleet, AdmissionOrders(table, SearchBudget(10**7)))
        search.take(start.assigned())
        search.improve()
        search.shake(rounds)
        found.append(search.placement())
    still, shaken, again = found
    assert shaken.makespan_s < 0.99 * still.makespan_s
    assert shaken.order.tolist() == again.order.tolist()
    assert shaken.starts.tolist() == again.starts.tolist()
    enough = PlacementSearch(table, start.fleet, AdmissionOrders(table, SearchBudget(10**7)))
    enough.take(start.assigned())
    enough.shake(200, enough_s=start.makespan_s)
    assert enough.placement().makespan_s == start.makespan_s


@pytest.mark.parametrize("seed", range(6))
def test_search_finds_the_optimum_of_two_instances(seed: int) -> None:
    busy = replace(TP8, beta_s=0.01, switch_s=0.0)
    table = columns(problem([busy], heavy_tailed(seed, 10)))
    ends_s = [place(table, in_a_row(table, [], 0, 2), half >> np.arange(10) & 1).makespan_s for half in range(1 << 9)]
    (best, *_) = best_of_all(table, [], 0.0, SearchBudget(10**7), lambda: False)
    assert best.makespan_s == pytest.approx(min(ends_s))


@given(SEEDS, st.integers(1, 10))
def test_best_of_all_is_sorted_and_no_worse_than_its_starts(seed: int, count: int) -> None:
    table, start = dealt(seed, count)
    found = best_of_all(table, [start], 0.0, SearchBudget(20_000), lambda: False)
    ends_s = [each.makespan_s for each in found]
    assert ends_s == sorted(ends_s)
    assert 1 <= len(found) <= CLOSELY
    assert ends_s[0] <= start.makespan_s
    assert all(sorted(each.order.tolist()) == list(range(count)) for each in found)
    assert best_of_all(table, [start], 0.0, SearchBudget(20_000), lambda: True) == []


def test_best_of_all_keeps_the_best_start_with_a_tiny_budget() -> None:
    table, _ = dealt(1, 10, kind=BUSY)
    starts = [place(table, current_fleet(table), np.arange(10) % at) for at in (*[1] * 20, 4)]
    found = best_of_all(table, starts, 0.0, SearchBudget(1), lambda: False)
    assert found[0].makespan_s == starts[-1].makespan_s < starts[0].makespan_s
    work = SearchBudget(3)
    assert (work.spend(2), work.spend(1), work.left) == (True, False, 0)


# --- fleets


def per_node(fleet: SolverFleet, node: int) -> frozenset[tuple[frozenset[int], tuple[int, ...]]]:
    """Return the kinds of instances by the set of nodes that they are on."""
    held: dict[frozenset[int], list[int]] = {}
    for kind, gpus in zip(fleet.configuration.tolist(), fleet.gpus, strict=True):
        held.setdefault(frozenset(gpu // node for gpu in gpus), []).append(kind)
    return frozenset((nodes, tuple(sorted(kinds))) for nodes, kinds in held.items())


@pytest.mark.parametrize(
    ("gpus", "node", "sizes", "contents"),
    [
        (4, 4, (1, 2), [{(0, 0, 0, 0), (0, 0, 1), (1, 1)}]),
        (5, 4, (2, 3), [{(0, 0), (1,)}, {()}]),
        (8, 4, (3, 4), [{(0,), (1,)}] * 2),
        (7, 4, (2, 3), [{(0, 0), (1,)}, {(0,), (1,)}]),
    ],
)
def test_every_full_fleet_is_enumerated_once(
    gpus: int, node: int, sizes: tuple[int, ...], contents: list[set[tuple[int, ...]]]
) -> None:
    """The order of equal idle nodes does not matter."""
    table = columns(problem([configuration(f"c{size}", size) for size in sizes], [(1, 1)], gpus=gpus, per_node=node))
    walked = list(fleets(table, 1000))
    told = [tuple(sorted(kinds for _, kinds in per_node(each, node))) for each in walked]
    wanted = {tuple(sorted(kinds for kinds in each if kinds)) for each in product(*contents)}
    assert sorted(told) == sorted(wanted)
    assert all(len({gpu for held in each.gpus for gpu in held}) == sum(map(len, each.gpus)) for each in walked)
    assert len(list(fleets(table, 2))) == min(2, len(walked))


def test_instance_of_several_nodes_takes_any_free_nodes() -> None:
    """The wide instance takes two of three full nodes; smaller instances take the others and the half node."""
    kinds = [configuration("node", 4), configuration("wide", 8)]
    for running, ways in ((False, 2), (True, 3)):
        current = [CurrentInstance(EngineId("i0"), kinds[0].id, tuple(map(GpuId, range(4))))] if running else []
        table = columns(problem(kinds, [(1, 1)], gpus=14, per_node=4, current=current))
        spans = {
            frozenset(gpu // 4 for gpu in gpus)
            for each in fleets(table, 1000)
            for kind, gpus in zip(each.configuration.tolist(), each.gpus, strict=True)
            if kind == 1
        }
        assert len(spans) == ways
        assert all(len(span) == 2 and 3 not in span for span in spans)


def test_every_subset_of_few_and_the_costliest_of_many_instances_are_kept() -> None:
    kinds = [configuration("tp1", 1), configuration("tp2", 2)]
    for count in (3, 4):
        lengths = [(1000 * place, 100) for place in range(1, count + 1)]
        running = fleet(kinds[0], count)
        table = columns(
            problem(kinds, lengths, gpus=4, per_node=4, current=running, places=range(count), states=[RUNNING] * count)
        )
        kept = {frozenset(each.current[each.current >= 0].tolist()) for each in fleets(table, 1000)}
        if count == 3:  # keeping only one would leave room for another of its kind
            assert kept == {frozenset(some) for size in (0, 2, 3) for some in combinations(range(3), size)}
        else:
            assert kept == {frozenset(range(count - size, count)) for size in (0, 2, 4)}


# --- filling


@given(SEEDS, st.integers(1, 60), st.integers(1, 8))
def test_a_static_fleet_is_filled_longest_first_onto_the_least_loaded(seed: int, count: int, instances: int) -> None:
    table = columns(problem([TP2], heavy_tailed(seed, count)))
    least = least_s(table, 0, instances)
    for load, first in loads(table, 0):
        so_far, empty, expected = [0.0] * instances, [True] * instances, [0] * count
        for request in table.longest_first.tolist():
            least_loaded_one = so_far.index(min(so_far))
            if first and empty[least_loaded_one]:
                so_far[least_loaded_one] += TP2.alpha_s * table.remaining[request]
            so_far[least_loaded_one] += load[request]
            empty[least_loaded_one], expected[request] = False, least_loaded_one
        assigned = least_loaded(table, 0, instances, load, first)
        assert assigned.tolist() == expected
        row = in_a_row(table, [], 0, instances)
        assert least <= place(table, row, assigned).decode_s.max() * (1 + 1e-9)


def test_many_requests_are_placed_in_rounds_with_almost_the_same_end() -> None:
    table = columns(problem([TP2], heavy_tailed(1, MANY + 1, 5.5), gpus=128))
    row = in_a_row(table, [], 0, 64)
    for load, first in loads(table, 0):
        in_rounds, one_at_a_time = (
            place(table, row, assigned).makespan_s
            for assigned in (
                least_loaded(table, 0, 64, load, first),
                one_by_one(table, 0, 64, load, first, table.longest_first),
            )
        )
        assert in_rounds <= 1.02 * one_at_a_time


def test_requests_stay_if_cuts_match_the_running_instances() -> None:
    """Each instance has four equal requests, longer than those of the next, so the cuts match the instances."""
    lengths = [(1000, 1000 * (4 - place // 4)) for place in range(16)]
    at = [(3, 0, 2, 1)[place // 4] for place in range(16)]
    table = columns(problem([TP2], lengths, gpus=8, current=fleet(TP2, 8), places=at, states=[RUNNING] * 16))
    cuts = [RequestCut(0, True, [(first, first + 4)]) for first in range(0, 16, 4)]
    assert match(table, cuts, range(4)) == [3, 0, 2, 1]
    assert match(table, cuts, (0, 3)) == [3, 0, -1, -1]
    found = packed(table, cuts)
    assert found is not None
    assert moves(table, found) == 0
    assert found.assigned().tolist() == at


def test_idle_instances_are_kept() -> None:
    table = columns(problem([TP2], [(1000, 1000)] * 8, gpus=8, current=fleet(TP2, 8)))
    cuts = [RequestCut(0, kept, [(2 * place, 2 * place + 2)]) for place, kept in enumerate((True, False, True, True))]
    assert match(table, cuts, range(3)) == [0, -1, 1, 2]
    whole = packed(table, cuts)
    assert whole is not None
    assert whole.fleet.current.tolist() == [0, 1, 2, 3]  # a new instance in place of an equal one counts as kept


@given(SEEDS, st.integers(1, 60), st.sampled_from([30_000, 10**6]))
def test_cuts_end_in_time(seed: int, count: int, capacity: int) -> None:
    lengths = [(context, min(remaining, 20_000)) for context, remaining in heavy_tailed(seed, count)]
    kinds = [replace(kind, kv_capacity_tokens=capacity * kind.gpus) for kind in (TP1, TP2, TP8)]
    table = columns(problem(kinds, lengths))
    limit_s = lower_bound_s(table)
    while (cuts := RequestCutter(table).cut(limit_s)) is None:
        limit_s *= 1.5
    for found, until_s in ((cuts, limit_s), (soonest_cut(table, lower_bound_s(table), 1e6), limit_s * 1.02)):
        whole = packed(table, found or [])
        assert whole is not None
        assert sorted(whole.order.tolist()) == list(range(count))
        assert whole.makespan_s <= until_s * (1 + 1e-9)
        assert sum(map(len, whole.fleet.gpus)) <= 16


# --- fewer moves, and equation 2


@given(SEEDS, st.integers(1, 60), st.integers(1, 4))
def test_settled_moves_only_as_many_requests_as_each_length_requires(seed: int, count: int, used: int) -> None:
    """Requests have two lengths and run one at a time, so that no other request can move back without a later end."""
    one_at_a_time = replace(TP2, max_sequences=1)
    table, start = dealt(seed, count, kind=one_at_a_time, states=[RUNNING, WAITING], two_lengths=True)
    at = start.assigned() % used
    before = place(table, current_fleet(table), at)
    after = settled(table, before, before.makespan_s * (1 + 1e-6))
    of_length = table.remaining > 1000
    surplus = sum(
        np.maximum(
            np.bincount(table.source[some & (table.source >= 0)], minlength=4) - np.bincount(at[some], minlength=4), 0
        ).sum()
        for some in (of_length, ~of_length)
    )
    assert moves(table, after) <= surplus / (1 - LEAST)
    assert (
        np.bincount(after.assigned()[of_length], minlength=4).tolist()
        == np.bincount(at[of_length], minlength=4).tolist()
    )


@pytest.mark.parametrize(("least", "most"), [(1, 8), (0, 8)])
def test_balanced_moves_surplus_to_the_emptiest_instance(least: int, most: int) -> None:
    """Ten of twelve instances are full within the band, one is above and one is below the band."""
    kind = configuration("tp2", 2, capacity=1000, slots=8)
    held = [most, *[8] * 10, least]
    lengths = [(50, 50)] * most + [(31, 31)] * 80 + [(50, 50)] * least
    given_problem = problem([kind], lengths, gpus=24, current=fleet(kind, 24))
    table = columns(replace(given_problem, kv_balance=KvBalance(0.47, 0.07)))
    before = place(table, current_fleet(table), np.repeat(np.arange(12), held))
    after = balanced(table, before, 1e9)
    assert violation(table, before) > 0.2
    assert violation(table, after) == 0.0
    assert int((before.assigned() != after.assigned()).sum()) == 4 - least


# --- the choice


def test_chosen_prefers_the_fewest_changes_among_similar_ends() -> None:
    """Requests run on the first of two instances; using the other instead moves all of them."""
    table = columns(problem([TP2], [(1000, 3000)] * 8, current=fleet(TP2, 4), places=[0] * 8, states=[RUNNING] * 8))
    first, second, fresh = ([(0, (GpuId(gpu), GpuId(gpu + 1)))] for gpu in (0, 2, 4))
    stays, moves_all, anew = (
        place(table, SolverFleet.of(table, (), slots), np.zeros(8, dtype=np.int64)) for slots in (first, second, fresh)
    )
    late = replace(stays, decode_s=stays.decode_s + 60.0)
    barely = replace(moves_all, decode_s=moves_all.decode_s * 0.998)
    clearly = replace(moves_all, decode_s=moves_all.decode_s * 0.99)
    assert chosen(table, late, [], [barely, stays]) is stays
    assert chosen(table, late, [], [clearly, stays]) is clearly
    assert chosen(table, late, [], [replace(anew, switch_s=np.zeros(1)), moves_all]) is moves_all
    assert chosen(table, None, [], [moves_all, stays]) is stays
    assert chosen(table, stays, [], [moves_all]) is moves_all  # no gain: the current placement is kept
    assert chosen(table, None, [], []) is None
