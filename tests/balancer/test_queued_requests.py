"""Tests of requests queued in a gateway: the fast loop does not move them and counts them for no engine."""

from builders import engine_report, gateway_report, request, sample

from balancer.balance import BalanceSituation, balanced_workers, decide_balance
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.fleet.state import EngineFacts, FleetState
from planner.model import Mode, RequestState, RequestView, Snapshot

SETTINGS = FastSettings(theta=0.0001)


def crowded(*queued: RequestView) -> Snapshot:
    """Return a snapshot with eight requests on e0 and none on e1."""
    state = FleetState([EngineFacts(id, "", max_sequences=4) for id in ("e0", "e1")])  # type: ignore[arg-type]
    state.fold_gateway(gateway_report(request("r0"), sequence=1), 90.0)
    for id in ("e0", "e1"):
        state.fold_engine(
            engine_report(id, 1, sample(waiting=1, decode_tokens_per_s=500.0, kv_capacity_tokens=100_000)), 99.0
        )
    held = [request(f"r{i}", generated=10 if i < 4 else 0) for i in range(8)]
    state.fold_gateway(gateway_report(*held, *queued, sequence=2), 99.0)
    return state.snapshot(100.0)


def test_gateway_queue_changes_no_moves() -> None:
    # One new request, and one with tokens, which comes from a failed engine.
    queued = request("q0", engine=None, generated=0), request("q1", engine=None, generated=20)
    with_queue, without = crowded(*queued), crowded()
    assert {r.id for r in with_queue.requests} - {r.id for r in without.requests} == {"q0", "q1"}
    assert balanced_workers(with_queue, SETTINGS) == balanced_workers(without, SETTINGS)
    decided, plain = (decide_balance(view, SETTINGS, BalanceSituation(Mode.ACT)) for view in (with_queue, without))
    assert decided.moves == plain.moves
    assert decided.moves


def test_requests_waiting_on_an_engine_do_not_count_as_queued() -> None:
    view = {r.id: r for r in crowded(request("q1", engine=None, generated=20)).requests}
    assert (view["q1"].engine, view["q1"].state) == (None, RequestState.RUNNING)  # type: ignore[index]
