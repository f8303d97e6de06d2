"""The makespan solver's parts: admission, the closed-form bound and its tightening, cuts, layouts, search; and what
`solve` promises beyond the contract's own tests."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from decode_oracle import step_by_step_s
from hypothesis import given
from hypothesis import strategies as st
from planner_builders import configuration

from planner.cost import Pending
from planner.makespan import alternatives, evaluate_placement, lower_bound, solve
from planner.model import Configuration, EngineId, GpuId, RequestId
from planner.problem import NEW, NOWHERE, RUNNING, WAITING, Infeasible, Instance, KvBalance, Problem, Requests, Transfer
from planner.solver.admission import admit, least, orders
from planner.solver.band import balanced, violation
from planner.solver.bound import lower_bound_s, room_shares
from planner.solver.columns import columns
from planner.solver.cut import Cutter
from planner.solver.dual import tightened_s
from planner.solver.evaluate import current_fleet, place
from planner.solver.layout import in_a_row, lay_out
from planner.solver.search import Work
from planner.solver.settle import moves, settled
from planner.solver.waves import sooner
from planner.solver.whole import raised_s

TP1 = configuration("tp1", 1, alpha_s=0.024, beta_s=8.7e-5, gamma_s=8.2e-8, capacity=200_000, switch_s=1.6)
TP2 = configuration("tp2", 2, alpha_s=0.0184, capacity=580_000, switch_s=1.7)
TP8 = configuration("tp8", 8, alpha_s=0.0143, gamma_s=1e-8, capacity=2_780_000, slots=1024, switch_s=2.3)
SEEDS = st.integers(0, 2**32 - 1)


def problem(
    configurations: Sequence[Configuration],
    lengths: Sequence[tuple[int, int]],  # context, remaining
    *,
    gpus: int = 16,
    per_node: int = 8,
    current: Sequence[Instance] = (),
    places: Sequence[int] | None = None,
    states: Sequence[int] | None = None,
    epsilon_s: float = 0.5,
    work_budget: int | None = None,
) -> Problem:
    count = len(lengths)
    return Problem(
        gpus_count=gpus,
        per_node=per_node,
        configurations=tuple(configurations),
        kv_bytes_per_token=196_608.0,
        transfer=Transfer(200.0, 1600.0, 0.002),
        current=tuple(current),
        requests=Requests(
            ids=tuple(RequestId(f"r{place}") for place in range(count)),
            context_tokens=np.array([context for context, _ in lengths], dtype=np.int64),
            remaining_tokens=np.array([remaining for _, remaining in lengths], dtype=np.int64),
            instance=np.array(places if places is not None else [NOWHERE] * count, dtype=np.int64),
            state=np.array(states if states is not None else [NEW] * count, dtype=np.int8),
        ),
        epsilon_s=epsilon_s,
        work_budget=work_budget,
    )


def heavy_tailed(seed: int, count: int, mean: float = 7.2) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    remaining = np.clip(rng.lognormal(mean, 1.1, count), 1, 32_768).astype(int).tolist()
    return list(zip(rng.integers(100, 3000, count).tolist(), remaining, strict=True))


def fleet(kind: Configuration, gpus: int) -> list[Instance]:
    return [
        Instance(EngineId(f"i{place}"), kind.id, tuple(GpuId(gpu) for gpu in range(first, first + kind.gpus)))
        for place, first in enumerate(range(0, gpus, kind.gpus))
    ]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=12),
    st.sampled_from([40, 60, 100]),
    st.integers(1, 6),
)
def test_admission_counts_the_iterations_of_decoding_step_by_step(
    held: list[tuple[int, int]], capacity: int, slots: int
) -> None:
    counted = configuration(alpha_s=1.0, beta_s=0.0, gamma_s=0.0, capacity=capacity, slots=slots)
    requests = [Pending(*each) for each in held]
    iterations = admit(
        [each.remaining_tokens for each in requests], [each.footprint_tokens for each in requests], capacity, slots
    )
    assert iterations == step_by_step_s(counted, requests)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=40),
    st.sampled_from([40, 60, 100]),
    st.integers(1, 6),
)
def test_orders_of_admission_take_no_longer_than_they_say_and_no_less_than_there_must_be(
    held: list[tuple[int, int]], capacity: int, slots: int
) -> None:
    """What is told is a schedule without blocking; first come first served in its order is no slower."""
    lefts = [remaining for _, remaining in held]
    rooms = [context + remaining for context, remaining in held]
    for told, order in orders(lefts, rooms, capacity, slots):
        assert sorted(order) == list(range(len(held)))
        taken = admit([lefts[each] for each in order], [rooms[each] for each in order], capacity, slots)
        assert least(lefts, rooms, capacity, slots) <= taken <= told


def test_who_waits_for_room_does_not_block_those_that_fit() -> None:
    """Longest first, the second waits for the first and keeps the small ones waiting; beside the first they fit."""
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
def test_evening_out_keeps_every_request_and_ends_no_later(seed: int) -> None:
    """Twice the KV room that there is."""
    kind = configuration("tp2", 2, alpha_s=0.0184, capacity=40_000, switch_s=1.7)
    table = columns(problem([kind], heavy_tailed(seed, 200)))
    fleet_of_kind = in_a_row(table, [], 0, 8)
    dealt = np.arange(200) % 8
    before = place(table, fleet_of_kind, dealt)
    (after,) = sooner(table, [before], 0.0, Work(100_000))
    assert sorted(after.order.tolist()) == list(range(200))
    assert after.makespan_s < before.makespan_s


def test_a_request_too_large_is_never_admitted() -> None:
    assert admit([1, 1], [5, 11], 10, 4) == float("inf")


@given(SEEDS, st.sampled_from([0.05, 0.2, 1.0]), st.sampled_from([4, 1024]))
def test_both_bounds_are_below_what_is_found(seed: int, room: float, slots: int) -> None:
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


def test_one_instance_too_few_is_seen() -> None:
    """Three equal requests on two engines: on the mean one and a half, and yet one of them has two."""
    kind = configuration("tp8", 8, alpha_s=0.0, beta_s=0.01, gamma_s=0.0, switch_s=0.0)
    table = columns(problem([kind], [(0, 1000)] * 3))
    closed_s = lower_bound_s(table)
    assert closed_s == pytest.approx(15.0, rel=1e-3)
    assert raised_s(table, closed_s, 20.0, tight=False) == pytest.approx(15.0, rel=1e-3)  # work can be split
    kind = configuration("tp8", 8, alpha_s=0.01, beta_s=0.001, gamma_s=0.0, switch_s=0.0)
    table = columns(problem([kind], [(0, 1000)] * 2 + [(0, 100)] * 200))
    assert lower_bound_s(table) == pytest.approx(14.9, rel=0.05)
    assert raised_s(table, lower_bound_s(table), 40.0, tight=False) > 1.01 * lower_bound_s(table)


def test_where_sequences_are_short_the_program_refuses_more() -> None:
    """Eight sequences at a time: what they generate together takes far longer than the longest alone."""
    kind = configuration("tp2", 2, alpha_s=0.02, beta_s=1e-6, gamma_s=0.0, slots=8, switch_s=0.0)
    table = columns(problem([kind], [(100, 1000)] * 640))
    closed_s = lower_bound_s(table)
    assert closed_s == pytest.approx(20.0, rel=0.01)
    assert tightened_s(table, closed_s, 300.0) == pytest.approx(0.02 * 1000 * 640 / 8 / 8, rel=0.02)


@given(SEEDS, st.integers(0, 60))
def test_cuts_cover_every_request_once(seed: int, count: int) -> None:
    table = columns(problem([TP1, TP2, TP8], heavy_tailed(seed, count)))
    cuts = Cutter(table).cut(lower_bound_s(table) * 1.5 + 1)
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
def test_a_row_takes_all_that_there_is_room_for(gpus: int, per_node: int, wanted: int, most: int) -> None:
    kinds = [TP1, TP2, configuration("wide", 2 * per_node)]
    table = columns(problem(kinds, [], gpus=gpus, per_node=per_node))
    row = in_a_row(table, [], wanted, most)
    assert len(row) == min(most, int(table.placeable[wanted]))
    assert list(row.gpus) == sorted(row.gpus)
    assert len({gpu for held in row.gpus for gpu in held}) == len(row) * kinds[wanted].gpus
    assert all(len({gpu // per_node for gpu in held}) == max(1, len(held) // per_node) for held in row.gpus)


def test_the_tail_is_packed_not_spread() -> None:
    """One kind of instance alone: what is gained over longest first onto the least loaded is packing."""
    solution = solve(problem([TP2], heavy_tailed(1, 2048, 8.6), gpus=128))
    (spread,) = solution.alternatives
    assert solution.makespan_s < 0.95 * spread.makespan_s


@pytest.mark.parametrize("mean", [5.5, 7.2, 8.6])
def test_a_large_step_is_within_four_percent_of_its_bound(mean: float) -> None:
    solution = solve(problem([TP1, TP2, TP8], heavy_tailed(1, 8192, mean), gpus=512))
    assert solution.gap is not None
    assert solution.gap <= 0.04


def test_a_skewed_fleet_whose_switches_are_dear_is_rebalanced() -> None:
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
def test_the_band_is_missed_by_less_and_in_time(seed: int, count: int, mu: float, delta: float) -> None:
    rng = np.random.default_rng(seed)
    given_problem = problem([TP1, TP2, TP8], heavy_tailed(seed, count), current=fleet(TP2, 16))
    table = columns(replace(given_problem, kv_balance=KvBalance(mu, delta)))
    before = place(table, current_fleet(table), rng.integers(0, 8, count))
    limit_s = before.makespan_s * 1.05
    after = balanced(table, before, limit_s)
    assert sorted(after.order.tolist()) == list(range(count))
    assert after is before or violation(table, after) < violation(table, before)
    assert after.makespan_s <= limit_s


def test_new_instances_take_no_name_that_a_current_one_has() -> None:
    current = [Instance(EngineId("new0"), TP2.id, (GpuId(4), GpuId(5)))]
    solution = solve(problem([TP2, TP8], heavy_tailed(1, 40), current=current, places=[0] * 40, states=[WAITING] * 40))
    names = [placed.id for placed in solution.instances]
    assert len(set(names)) == len(names)
    assert all(placed.kept == (placed.id == "new0") for placed in solution.instances)


def test_what_does_not_fit_says_by_how_much() -> None:
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
    assert max(evaluate_placement(given_problem)) == solution.current_makespan_s
    assert lower_bound(given_problem) <= solution.lower_bound_s
    assert tuple(alternatives(given_problem)) == solution.alternatives
    assert solution.makespan_s <= min(each.makespan_s for each in solution.alternatives)


def test_being_told_to_stop_still_gives_an_answer() -> None:
    given_problem = problem([TP1, TP2, TP8], heavy_tailed(5, 64))
    stopped = solve(given_problem, stop=lambda: True)
    assert stopped.makespan_s >= solve(given_problem).makespan_s
    assert sum(len(placed.requests) for placed in stopped.instances) == 64
