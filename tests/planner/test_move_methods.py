"""Tests of the choice of move methods, against hand calculations by appendix A of the paper."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.operations import (
    OperationItemResult,
)
from orchestrrl.daemon.live_profile import given_profile
from orchestrrl.fleet.move_orders import fixed_parts, moved_requests
from planner.cost.profile import Curve
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    GpuId,
    MoveMethod,
    RequestId,
    RequestMove,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.move_methods import (
    FIXED_PRIOR_S,
    MOST_FIXED_S,
    MOST_ORDERS,
    PRIOR_COUNTS_FOR,
    FixedMoveCost,
    MovePricing,
    choose_move_methods,
)
from planner.solver.problem import KvTransferCost

TP2 = ConfigurationId("tp2")
PREFILL = 10_000.0
KV_BYTES = 100_000.0
PER_NODE = 8
# Ten microseconds per token between nodes, over both GPUs of an engine, and a quarter of that within one.
INTER_GBPS, INTRA_GBPS, TRANSFER_FIXED_S = 40.0, 160.0, 0.05
FIXED_S = 0.2


def engine(name: str, gpus: tuple[int, ...], configuration: ConfigurationId | None = TP2) -> EngineView:
    ids = tuple(GpuId(gpu) for gpu in gpus)
    return EngineView(
        EngineId(name), f"http://{name}", configuration, EngineHealth.OK, 1, 0, 10**6, 10**6, 64, None, 0.1, ids
    )


def request(
    name: str, context_tokens: int, state: RequestState = RequestState.RUNNING, generated_tokens: int = 1
) -> RequestView:
    prompt_tokens = context_tokens - generated_tokens
    return RequestView(RequestId(name), EngineId("e0"), state, prompt_tokens, generated_tokens)


def costing(rebuilt: Curve | None = None, **versions: str) -> MovePricing:
    configuration = Configuration(TP2, 2, 0.02, 0.0, 0.0, 10**6, 64, PREFILL, 1.0)
    profile = given_profile(configuration, "2026-01-31")
    transfer = KvTransferCost(
        INTER_GBPS,
        INTRA_GBPS,
        0.0,
        rebuilt,
        kv_bytes_per_token=KV_BYTES,
        transfer_fixed_s=TRANSFER_FIXED_S,
        recompute_fixed_s=FIXED_S,
    )
    return MovePricing({TP2: profile}, transfer, PER_NODE, {EngineId(id): name for id, name in versions.items()})


def order(name: str, to: str) -> RequestMove:
    return RequestMove(RequestId(name), EngineId("e0"), EngineId(to))


ENGINES = (engine("e0", (0, 1)), engine("near", (2, 3)), engine("far", (8, 9)), engine("other", (10, 11), None))
ALIKE = {"e0": "tp2/v1", "near": "tp2/v1", "far": "tp2/v1"}


@given(
    st.lists(
        st.tuples(
            st.integers(2, 200_000),
            st.sampled_from(["near", "far", "other", "gone"]),
            st.sampled_from(RequestState),
            st.integers(0, 1),
        ),
        max_size=6,
    ),
    st.sampled_from([ALIKE, {**ALIKE, "far": "tp2/v2"}, {}]),
)
def test_cheapest_available_method_is_chosen(
    moves: list[tuple[int, str, RequestState, int]], versions: dict[str, str]
) -> None:
    """Contexts are computed one after the other; the fixed parts of all moves overlap. A waiting request has no KV: a
    preempted one is recomputed, and one that has not run yet only delays the requests after it."""
    requests = tuple(request(f"r{index}", tokens, state, made) for index, (tokens, _, state, made) in enumerate(moves))
    orders = [order(f"r{index}", to) for index, (_, to, _, _) in enumerate(moves)]
    priced = choose_move_methods(orders, Snapshot(0.0, ENGINES, requests), costing(**versions))
    computed_before_s = {"near": 0.0, "far": 0.0}
    for (tokens, to, state, made), ordered, result in zip(moves, orders, priced, strict=True):
        runs = state is RequestState.RUNNING
        if to not in computed_before_s:
            assert result == ordered
            continue
        if not runs and not made:
            assert result == ordered
            computed_before_s[to] += tokens / PREFILL
            continue
        per_token_s = KV_BYTES * 8 / (2 * {"near": INTRA_GBPS, "far": INTER_GBPS}[to] * 1e9)
        ways = {MoveMethod.RECOMPUTE: FIXED_S + computed_before_s[to] + tokens / PREFILL}
        if versions and versions[to] == versions["e0"] and runs:
            ways[MoveMethod.TRANSFER] = TRANSFER_FIXED_S + tokens * per_token_s
        assert result.predicted_s == pytest.approx(min(ways.values()))
        assert result.predicted_s == pytest.approx(ways[result.method])
        assert result.fixed_s == {MoveMethod.RECOMPUTE: FIXED_S, MoveMethod.TRANSFER: TRANSFER_FIXED_S}[result.method]
        other = next((seconds for method, seconds in ways.items() if method is not result.method), 0.0)
        assert result.other_s == pytest.approx(other)
        if result.method is MoveMethod.RECOMPUTE:
            computed_before_s[to] += tokens / PREFILL
        assert replace(result, method=ordered.method, predicted_s=0.0, other_s=0.0, fixed_s=0.0) == ordered


def test_long_contexts_cost_more_per_token() -> None:
    """Attention makes the second half of a context more expensive than the first."""
    bend = Curve((0.0, 1000.0, 10_000.0), (0.0, 1000.0, 30_000.0))
    snapshot = Snapshot(0.0, ENGINES, (request("r", 10_000),))
    (straight,) = choose_move_methods([order("r", "far")], snapshot, costing())
    (bent,) = choose_move_methods([order("r", "far")], snapshot, costing(bend))
    assert (straight.predicted_s, bent.predicted_s) == (pytest.approx(FIXED_S + 1.0), pytest.approx(FIXED_S + 3.0))


def test_moved_requests_contains_only_completed_moves() -> None:
    orders = [order("a", "near"), order("b", "near"), order("c", "far")]
    items = [OperationItemResult("a", True, method=MoveMethod.TRANSFER), OperationItemResult("b", False, "gone")]
    (only,) = moved_requests(5.0, orders, items)
    assert (only.ended_s, only.move, only.item) == (5.0, orders[0], items[0])


def learnt(*seconds: float, prior_s: float = FIXED_PRIOR_S) -> FixedMoveCost:
    part = FixedMoveCost(prior_s)
    for each in seconds:
        part = part.after(each)
    return part


@given(st.lists(st.floats(), max_size=100), st.floats(0, MOST_FIXED_S))
def test_fixed_part_stays_within_bounds(measured_s: list[float], prior_s: float) -> None:
    part = learnt(*measured_s, prior_s=prior_s)
    assert 0 <= part.seconds <= MOST_FIXED_S
    assert len(part.measured_s) <= MOST_ORDERS


@given(
    st.floats(0.001, 10.0),
    st.integers(MOST_ORDERS, 100),
    st.sampled_from([0.0, 1e6, math.inf, -math.inf, math.nan]),
    st.randoms(use_true_random=False),
)
def test_fixed_part_follows_the_majority_of_moves(true_s: float, moves: int, stray: float, random: Random) -> None:
    """A quarter of the moves stalled or were measured wrongly."""
    part = learnt()
    for turn in range(moves):
        part = part.after(stray if turn % 4 == 3 else true_s * random.uniform(0.9, 1.1))
    assert part.seconds == pytest.approx(true_s, rel=0.11)
    other = learnt(*part.measured_s, *[3 * true_s] * MOST_ORDERS)  # and after a change
    assert other.seconds == pytest.approx(min(MOST_FIXED_S, 3 * true_s))


def test_few_moves_do_not_change_the_fixed_part() -> None:
    assert learnt(*[5.0] * (PRIOR_COUNTS_FOR - 1)).seconds == FIXED_PRIOR_S
    assert learnt(*[5.0] * (PRIOR_COUNTS_FOR + 1)).seconds == 5.0


def test_fixed_part_excludes_the_cost_of_contexts() -> None:
    """Several contexts were computed one after the other. Moves without a prediction, a result or a measurement do not
    count, nor do moves by another method than ordered."""
    names = ("one", "two", "queued", "unseen", "fell back", "gone")
    requests = tuple(
        request(name, 10_000, RequestState.WAITING if name == "queued" else RequestState.RUNNING, int(name != "queued"))
        for name in names
    )
    priced = choose_move_methods([order(name, "far") for name in names], Snapshot(0.0, ENGINES, requests), costing())
    items = [
        OperationItemResult("one", True, "", 10_000, 1.0 + 0.3, MoveMethod.RECOMPUTE),
        OperationItemResult("two", True, "", 10_000, 2.0 + 0.4, MoveMethod.RECOMPUTE),
        OperationItemResult("queued", True, "", 0, 9.0),
        OperationItemResult("unseen", True, "", 10_000, 0.0, MoveMethod.RECOMPUTE),
        OperationItemResult("fell back", True, "", 10_000, 9.0, MoveMethod.TRANSFER),
        OperationItemResult("gone", False, "finished before the move", 0, 9.0, MoveMethod.RECOMPUTE),
    ]
    found = fixed_parts(moved_requests(0.0, priced, items))
    assert found == [(MoveMethod.RECOMPUTE, pytest.approx(0.3)), (MoveMethod.RECOMPUTE, pytest.approx(0.4))]
