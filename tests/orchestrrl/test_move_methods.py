"""Which way a request moves, against the arithmetic of appendix A done by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.beliefs import Moving
from orchestrrl.move_methods import MoveCosting, ended, with_methods
from orchestrrl.operations import ItemResult, MoveMethod, RequestMove
from orchestrrl.profiles.refit import given_profile
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    GpuId,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.problem import Transfer
from planner.profile import Curve

TP2 = ConfigurationId("tp2")
PREFILL = 10_000.0
KV_BYTES = 100_000.0
PER_NODE = 8
# Ten microseconds a token between nodes, by both GPUs of an engine, and a quarter of that within one.
INTER_GBPS, INTRA_GBPS, LATENCY_S = 40.0, 160.0, 0.05


def engine(name: str, gpus: tuple[int, ...], configuration: ConfigurationId | None = TP2) -> EngineView:
    ids = tuple(GpuId(gpu) for gpu in gpus)
    return EngineView(
        EngineId(name), f"http://{name}", configuration, EngineHealth.OK, 1, 0, 10**6, 10**6, 64, None, 0.1, ids
    )


def request(name: str, context_tokens: int, state: RequestState = RequestState.RUNNING) -> RequestView:
    return RequestView(
        id=RequestId(name), engine=EngineId("e0"), state=state, prompt_tokens=context_tokens - 1, generated_tokens=1
    )


def costing(rebuilt: Curve | None = None, **versions: str) -> MoveCosting:
    configuration = Configuration(TP2, 2, 0.02, 0.0, 0.0, 10**6, 64, PREFILL, 1.0)
    (profile,) = given_profile([configuration], "2026-01-31").configurations
    moving = Moving(Transfer(INTER_GBPS, INTRA_GBPS, LATENCY_S, rebuilt), KV_BYTES)
    return MoveCosting({TP2: profile}, moving, PER_NODE, {EngineId(id): name for id, name in versions.items()})


def order(name: str, to: str) -> RequestMove:
    return RequestMove(RequestId(name), EngineId("e0"), EngineId(to))


ENGINES = (engine("e0", (0, 1)), engine("near", (2, 3)), engine("far", (8, 9)), engine("other", (10, 11), None))
ALIKE = {"e0": "tp2/v1", "near": "tp2/v1", "far": "tp2/v1"}


@given(
    st.lists(
        st.tuples(
            st.integers(2, 200_000), st.sampled_from(["near", "far", "other", "gone"]), st.sampled_from(RequestState)
        ),
        max_size=6,
    ),
    st.sampled_from([ALIKE, {**ALIKE, "far": "tp2/v2"}, {}]),
)
def test_the_cheaper_method_that_can_be_had(
    moves: list[tuple[int, str, RequestState]], versions: dict[str, str]
) -> None:
    requests = tuple(request(f"r{index}", tokens, state) for index, (tokens, _, state) in enumerate(moves))
    orders = [order(f"r{index}", to) for index, (_, to, _) in enumerate(moves)]
    priced = with_methods(orders, Snapshot(0.0, ENGINES, requests), costing(**versions))
    computed_before_s = {"near": 0.0, "far": 0.0}
    for (tokens, to, state), ordered, result in zip(moves, orders, priced, strict=True):
        if state is not RequestState.RUNNING or to not in computed_before_s:
            assert result == ordered
            continue
        per_token_s = KV_BYTES * 8 / (2 * {"near": INTRA_GBPS, "far": INTER_GBPS}[to] * 1e9)
        ways = {MoveMethod.RECOMPUTE: computed_before_s[to] + tokens / PREFILL}
        if versions and versions[to] == versions["e0"]:
            ways[MoveMethod.TRANSFER] = LATENCY_S + tokens * per_token_s
        assert result.predicted_s == pytest.approx(min(ways.values()))
        assert result.predicted_s == pytest.approx(ways[result.method])
        other = next((seconds for method, seconds in ways.items() if method is not result.method), 0.0)
        assert result.other_s == pytest.approx(other)
        if result.method is MoveMethod.RECOMPUTE:
            computed_before_s[to] = ways[result.method]
        assert replace(result, method=ordered.method, predicted_s=0.0, other_s=0.0) == ordered


def test_long_contexts_bend() -> None:
    """Attention makes the second half of a context dearer than the first."""
    bend = Curve((0.0, 1000.0, 10_000.0), (0.0, 1000.0, 30_000.0))
    snapshot = Snapshot(0.0, ENGINES, (request("r", 10_000),))
    (straight,) = with_methods([order("r", "far")], snapshot, costing())
    (bent,) = with_methods([order("r", "far")], snapshot, costing(bend))
    assert (straight.predicted_s, bent.predicted_s) == (pytest.approx(1.0), pytest.approx(3.0))


def test_only_moves_that_were_carried_out_are_told_of() -> None:
    orders = [order("a", "near"), order("b", "near"), order("c", "far")]
    items = [ItemResult("a", True, method=MoveMethod.TRANSFER), ItemResult("b", False, "gone")]
    (only,) = ended(5.0, orders, items)
    assert (only.ended_s, only.move, only.item) == (5.0, orders[0], items[0])
