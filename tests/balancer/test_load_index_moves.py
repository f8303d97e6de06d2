"""Tests of moves by the load index: each rule alone, and all rules against a slow oracle."""

import json
import random
from pathlib import Path

import pytest
from balance_builders import running as running_requests
from balance_builders import waiting as waiting_requests
from balance_oracle import Oracle
from balance_strategies import Problem, problems, random_problem
from hypothesis import given
from hypothesis import strategies as st

from balancer.load_index import Worker
from balancer.load_index_moves import Balance, decide
from planner.model import EngineId

SNAPSHOT = Path(__file__).parents[3] / "shared" / "contracts" / "balance_snapshot.json"


def worker(
    name: str,
    running: dict[str, int] | None = None,
    waiting: dict[str, int] | None = None,
    *,
    free: int = 10_000,
    slots: int = 16,
    rate: float | None = 100.0,
) -> Worker:
    there, queued = running_requests(*(running or {}).items()), waiting_requests(*(waiting or {}).items())
    return Worker(EngineId(name), there, queued, 20_000, free, slots, rate)


def moves_of(balance: Balance) -> list[tuple[str, str, str, str]]:
    return [(move.request, move.from_engine, move.to_engine, move.state) for move in balance.moves]


def decided(*workers: Worker, theta: float = 0.0, **knobs: object) -> Balance:
    return decide(theta, workers, **knobs)  # type: ignore[arg-type]


@pytest.mark.exact
@given(problems())
def test_moves_match_the_oracle(problem: Problem) -> None:
    oracle = Oracle(problem)
    before = oracle.indices()
    balance = decide(*problem)
    moves, stopped_because = oracle.run()
    assert moves_of(balance) == moves
    assert balance.stopped_because == stopped_because
    assert balance.load_before == before
    assert balance.load_after == oracle.indices()
    assert list(balance.load_after) == [worker.id for worker in problem.workers]


@pytest.mark.parametrize("seed", range(20))
def test_moves_match_the_oracle_on_thousands_of_fleets(seed: int) -> None:
    rng = random.Random(seed)
    moves = 0
    for _ in range(150):
        problem = random_problem(rng)
        oracle, balance = Oracle(problem), decide(*problem)
        assert (moves_of(balance), balance.stopped_because) == oracle.run()
        assert balance.load_after == oracle.indices()
        moves += len(balance.moves)
    assert moves > 150  # the comparison is not empty


@given(problems(), st.integers(0, 4))
def test_a_limit_cuts_the_same_moves_short(problem: Problem, limit: int) -> None:
    unlimited, limited = decide(*problem), decide(*problem, max_moves=limit)
    assert limited.moves == unlimited.moves[:limit]
    assert (limited.stopped_because == "max_moves") == (len(unlimited.moves) > limit) or (
        limited.stopped_because == "max_moves" and unlimited.stopped_because == "no_feasible_move"
    )


@given(problems(), st.data())
def test_excluded_requests_stay_and_nothing_moves_twice(problem: Problem, data: st.DataObject) -> None:
    ids = sorted(request.id for worker in problem.workers for request in worker.running + worker.waiting)
    excluded = frozenset(data.draw(st.sets(st.sampled_from(ids))) if ids else ())
    moved = [move.request for move in decide(*problem, excluded=excluded, forget_stuck=True).moves]
    assert not excluded & set(moved)
    assert len(set(moved)) == len(moved)


@given(problems())
def test_the_order_in_which_a_fleet_is_listed_changes_nothing(problem: Problem) -> None:
    mirrored = Problem(problem.theta, tuple(reversed(problem.workers)))
    assert decide(*problem).moves == decide(*mirrored).moves


@given(problems())
def test_without_stalls_moves_only_ever_lower_the_spread(problem: Problem) -> None:
    balance = decide(*problem)
    if balance.spread_before is not None:
        assert balance.spread_after is not None
        assert balance.spread_after < balance.spread_before or not balance.moves


@given(problems())
def test_forget_stuck_only_adds_moves(problem: Problem) -> None:
    plain, forgetting = decide(*problem), decide(*problem, forget_stuck=True)
    assert forgetting.moves[: len(plain.moves)] == plain.moves
    assert forgetting.load_before == plain.load_before


@pytest.mark.shared
def test_contract_example() -> None:
    if not SNAPSHOT.exists():
        pytest.skip(f"{SNAPSHOT} does not exist: the contract's examples are outside of the repository")
    example = json.loads(SNAPSHOT.read_text())

    def contexts(entries: list[dict[str, int | str]]) -> list[tuple[str, int]]:
        return [(str(entry["id"]), int(entry["context_tokens"])) for entry in entries]

    workers = tuple(
        Worker(
            **{
                **entry,
                "running": running_requests(*contexts(entry["running"])),
                "waiting": waiting_requests(*contexts(entry["waiting"])),
            }
        )
        for entry in example["workers"]
    )
    balance = decide(example["theta"], workers)
    assert balance.load_before == {"w0": 4 / 2 / 180, "w1": 1 / 8 / 120}
    assert moves_of(balance) == [
        ("c", "w0", "w1", "waiting"),
        ("d", "w0", "w1", "waiting"),
        ("a", "w0", "w1", "running"),
    ]
    # w0: b runs, 2000 tokens are free of a mean of 4000. w1: e, c, d, a; 2900 are free of a mean of 775.
    assert balance.load_after == {"w0": 1 / 1 / 180, "w1": 4 / 7 / 120}


def test_an_empty_fleet_and_an_idle_one_are_balanced() -> None:
    assert decided() == Balance({}, {}, 0.0, 0.0, (), "within_theta")
    assert decided(worker("a"), worker("b")).stopped_because == "within_theta"


def test_a_spread_equal_to_theta_is_left_alone() -> None:
    fleet = worker("a", {"r": 100}, free=0), worker("b", free=99)
    assert decided(*fleet, theta=1 / 1 / 100).stopped_because == "within_theta"
    assert decided(*fleet, theta=0.0099).stopped_because == "no_feasible_move"


def test_waiting_leaves_before_running_and_short_before_long_and_ids_break_ties() -> None:
    crowded = worker("a", {"run": 1}, {"long": 90, "y": 20, "x": 20}, free=0, slots=1)
    balance = decided(crowded, worker("b", slots=64), worker("c", slots=64), worker("d", slots=64))
    assert [move.request for move in balance.moves] == ["x", "y", "long", "run"]
    assert [move.to_engine for move in balance.moves] == ["b", "c", "d", "b"]


def test_a_request_goes_only_where_its_context_fits() -> None:
    crowded = worker("a", {"r1": 500}, {"r2": 500}, free=0, slots=1)
    assert decided(crowded, worker("b", free=499)).moves == ()
    assert [move.request for move in decided(crowded, worker("b", free=500)).moves] == ["r2"]


def test_destination_keeps_its_concurrency_or_runs_all_its_requests() -> None:
    crowded = worker("a", {"r1": 400}, {f"w{i}": 400 for i in range(6)}, free=0, slots=1)
    # b: 2 running of 100 and 700 free, cap 9. With 400 more: 3 running, 300 free of a mean of 200, cap 4 of 3 requests.
    assert decided(crowded, worker("b", {"x": 100, "y": 100}, free=700)).moves[0].to_engine == "b"
    # With 3 more waiting requests of 100, 6 in total: cap 2 + 7 before, 3 + 300 // 150 = 5 after. Too few.
    queue = {"p": 100, "q": 100, "s": 100}
    assert decided(crowded, worker("b", {"x": 100, "y": 100}, queue, free=700)).moves == ()


def test_an_unknown_rate_is_the_median_of_the_known_positive_ones() -> None:
    def fleet(*rates: float | None) -> dict[EngineId, float | None]:
        return decided(
            *(worker(f"w{i}", {f"r{i}": 100}, free=0, rate=rate) for i, rate in enumerate(rates))
        ).load_before

    assert fleet(None, 10.0, 30.0)[EngineId("w0")] == 1 / 20
    assert fleet(None, 10.0, 30.0, 0.0)[EngineId("w0")] == 1 / 20
    assert fleet(None, None)[EngineId("w0")] == 1.0


def test_index_is_finite_for_rates_close_to_zero() -> None:
    balance = decided(worker("a", {"r": 1}, rate=5e-324), worker("b"))
    assert balance.spread_before is not None


def test_requests_leave_a_stalled_worker_even_if_the_spread_cannot_fall() -> None:
    stalled = worker("z", {"s1": 50, "s2": 40}, {"s3": 60}, rate=0.0)
    balance = decided(worker("a", {"r": 100}, {"q": 100}, free=0), worker("b"), stalled, theta=1e9)
    assert [(move.request, move.state) for move in balance.moves] == [
        ("s3", "waiting"),
        ("s2", "running"),
        ("s1", "running"),
    ]
    assert balance.load_before["z"] is None
    assert balance.load_after["z"] == 0.0
    assert balance.spread_before is None
    assert balance.spread_after is not None
    assert balance.stopped_because == "within_theta"


def test_nothing_is_moved_onto_a_stalled_worker() -> None:
    stalled = worker("a", {"s1": 50}, rate=0.0), worker("b", {"s2": 50}, rate=0.0)
    assert decided(*stalled).moves == ()
    assert decided(*stalled).spread_after is None
    # This also holds for a stalled worker that was just emptied, although its index is then 0.
    assert {move.to_engine for move in decided(*stalled, worker("c", {"r": 9})).moves} == {"c"}


def test_an_idle_worker_that_decodes_nothing_is_not_stalled() -> None:
    crowded = worker("a", {"r1": 10}, {"r2": 10, "r3": 10}, free=0, slots=1)
    balance = decided(crowded, worker("b", rate=0.0))
    assert [move.to_engine for move in balance.moves] == ["b", "b", "b"]
    assert balance.spread_after is not None


def test_stalled_worker_without_moves_blocks_others_unless_forgotten() -> None:
    stuck = worker("z", {"huge": 50_000}, rate=0.0)
    crowded = worker("a", {"r1": 10}, {"r2": 10}, free=0, slots=1)
    fleet = stuck, crowded, worker("b")
    assert decided(*fleet).moves == ()
    assert decided(*fleet).stopped_because == "no_feasible_move"
    freed = decided(*fleet, forget_stuck=True)
    assert [move.request for move in freed.moves] == ["r2", "r1"]
    assert freed.spread_before is None
    assert freed.spread_after is None
    assert freed.load_after["z"] is None


def test_a_worker_whose_requests_cannot_move_is_set_aside_for_the_next() -> None:
    stuck = worker("a", {"huge": 50_000}, {"huge2": 60_000}, free=0, slots=1, rate=10.0)
    crowded = worker("b", {"r1": 10}, {"r2": 10}, free=0, slots=1)
    # In addition, c is by far the least congested, so the spread falls from below.
    balance = decided(stuck, crowded, worker("c", free=20, rate=50.0))
    assert [(move.request, move.to_engine) for move in balance.moves] == [("r2", "c")]


def test_a_moved_running_request_gives_its_kv_back_and_takes_it_at_the_destination() -> None:
    balance = decided(worker("a", {"r1": 300, "r2": 300}, free=0, rate=10.0), worker("b", free=300, slots=1))
    assert moves_of(balance) == [("r1", "a", "b", "running")]
    # a: r2 and 300 tokens free, a cap of 2; b is full.
    assert balance.load_after == {"a": 1 / 2 / 10.0, "b": 1 / 1 / 100.0}


def test_a_request_that_joins_the_waiting_takes_no_kv() -> None:
    full = worker("b", {"x": 10}, free=1000, slots=1, rate=1000.0)
    crowded = worker("a", {"r1": 600}, {"r2": 600, "r3": 600}, free=0, slots=1, rate=1.0)
    assert [move.request for move in decided(crowded, full).moves] == ["r2", "r3", "r1"]
