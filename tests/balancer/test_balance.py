"""Tests of the fast loop's policy: the engines that take part, and when moves are made."""

from dataclasses import replace

import pytest
from builders import engine_report, gateway_report, request, sample

from balancer.balance import (
    UNKNOWN_MAX_SEQUENCES,
    BalanceDecision,
    BalanceSituation,
    balanced_workers,
    decide_balance,
)
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.fleet.state import EngineFacts, FleetState
from planner.model import EngineHealth, EngineId, Mode, RequestState, RequestView, Snapshot

SETTINGS = FastSettings(theta=0.0001)
ACT = BalanceSituation(Mode.ACT)


def crowded(*extra: RequestView, rate: float = 500.0, since_s: float = 10.0) -> Snapshot:
    """Return a snapshot with eight requests on e0 and none on e1, both with room for many, reported a second ago."""
    state = FleetState([EngineFacts(EngineId(id), "", max_sequences=4) for id in ("e0", "e1")])
    state.fold_gateway(gateway_report(request("r0"), sequence=1), 100.0 - since_s)
    for id in ("e0", "e1"):
        state.fold_engine(engine_report(id, 1, sample(decode_tokens_per_s=rate, kv_capacity_tokens=100_000)), 99.0)
    held = [request(f"r{i}", generated=10 if i < 4 else 0) for i in range(8)]
    state.fold_gateway(gateway_report(*held, *extra, sequence=2), 99.0)
    return state.snapshot(100.0)


def code(snapshot: Snapshot, situation: BalanceSituation = ACT, settings: FastSettings = SETTINGS) -> str:
    return decide_balance(snapshot, settings, situation).verdict.code


def test_congestion_moves_waiting_requests_first() -> None:
    decision = decide_balance(crowded(), SETTINGS, ACT)
    assert (decision.verdict.code, len(decision.balance.moves)) == ("spread", 4)
    assert {m.state for m in decision.balance.moves} == {RequestState.WAITING}
    assert all((m.from_engine, m.to_engine) == ("e0", "e1") for m in decision.balance.moves)
    assert decision.load_index["e1"] == 0.0


def test_advice_names_the_moves_and_holds() -> None:
    decision = decide_balance(crowded(), SETTINGS, BalanceSituation(Mode.ADVISE))
    assert decision.verdict.code == "advise_only"
    assert len(decision.balance.moves) == 4


@pytest.mark.parametrize(
    ("situation", "settings", "expected"),
    [
        (BalanceSituation(Mode.ACT, moves_open=1), SETTINGS, "moves_open"),
        (BalanceSituation(Mode.ACT, moves_ended_s=99.0), SETTINGS, "awaiting_telemetry"),
        (BalanceSituation(Mode.ACT, moves_ended_s=98.9), SETTINGS, "spread"),
        (ACT, FastSettings(stale_after_s=0.5), "stale_telemetry"),
        (ACT, FastSettings(theta=1.0), "within_theta"),
        (ACT, FastSettings(max_moves_per_request=0), "no_feasible_move"),
    ],
)
def test_decide_balance_holds_with_a_reason_code(
    situation: BalanceSituation, settings: FastSettings, expected: str
) -> None:
    assert code(crowded(), situation, settings) == expected


def test_moves_per_tick_are_limited() -> None:
    decision = decide_balance(crowded(), FastSettings(theta=0.0001, max_moves_per_tick=2), ACT)
    assert (len(decision.balance.moves), decision.balance.stopped_because) == (2, "max_moves")


def test_immovable_and_often_moved_requests_stay() -> None:
    def moved(decision: BalanceDecision) -> set[str]:
        return {move.request for move in decision.balance.moves}

    snapshot = crowded()
    fixed = {"r4": {"movable": False}, "r5": {"moves": SETTINGS.max_moves_per_request}}
    held = tuple(replace(view, **fixed.get(view.id, {})) for view in snapshot.requests)  # type: ignore[arg-type]
    assert {"r4", "r5"} <= moved(decide_balance(snapshot, SETTINGS, ACT))
    assert not {"r4", "r5"} & moved(decide_balance(replace(snapshot, requests=held), SETTINGS, ACT))


@pytest.mark.parametrize("health", [EngineHealth.SLOW, EngineHealth.GONE, EngineHealth.NONSENSE])
def test_only_healthy_engines_take_part(health: EngineHealth) -> None:
    snapshot = crowded()
    ill = tuple(replace(view, health=health) if view.id == "e1" else view for view in snapshot.engines)
    workers = balanced_workers(replace(snapshot, engines=ill), SETTINGS)
    assert [worker.id for worker in workers] == ["e0"]
    assert code(replace(snapshot, engines=ill)) == "within_theta"


def test_engine_without_reported_limit_is_limited_by_its_cache() -> None:
    snapshot = crowded()
    unknown = tuple(replace(view, max_sequences=0) for view in snapshot.engines)
    workers = balanced_workers(replace(snapshot, engines=unknown), SETTINGS)
    assert {worker.max_sequences for worker in workers} == {UNKNOWN_MAX_SEQUENCES}


def test_rate_of_zero_is_a_stall_only_after_the_grace_period() -> None:
    early, late = (crowded(rate=0.0, since_s=s) for s in (SETTINGS.stall_grace_s - 1, SETTINGS.stall_grace_s + 1))
    assert [w.decode_tokens_per_s for w in balanced_workers(early, SETTINGS)] == [None, None]
    assert [w.stalled for w in balanced_workers(late, SETTINGS)] == [True, False]


def test_hold_codes_without_requests_and_without_reports() -> None:
    assert code(FleetState().snapshot(0.0)) == "nothing_to_do"
    state = FleetState()
    state.fold_gateway(gateway_report(request("a")), 0.0)
    assert code(state.snapshot(0.0)) == "stale_telemetry"


def test_hold_names_the_stale_input() -> None:
    snapshot = replace(crowded(), requests_age_s=9.2)
    detail = decide_balance(snapshot, SETTINGS, ACT).verdict.detail
    assert detail == "a gateway report is 9.2 s old, limit 5 s"


def spread_out(e0_running: int, e1_running: int, e0_waiting: int = 0, free_fraction: float = 0.9) -> Snapshot:
    """Return requests on two engines of 16 slots; e0 decodes at half of e1's rate, so its load index is higher."""
    state = FleetState([EngineFacts(EngineId(id), "", max_sequences=16) for id in ("e0", "e1")])
    for id, rate in (("e0", 250.0), ("e1", 500.0)):
        reading = sample(decode_tokens_per_s=rate, kv_capacity_tokens=10_000, kv_usage_fraction=1 - free_fraction)
        state.fold_engine(engine_report(id, 1, reading), 99.0)
    held = [request(f"a{i}", generated=10) for i in range(e0_running)]
    held += [request(f"w{i}", generated=0) for i in range(e0_waiting)]
    held += [request(f"b{i}", engine="e1", generated=10) for i in range(e1_running)]
    state.fold_gateway(gateway_report(*held, sequence=1), 90.0)
    state.fold_gateway(gateway_report(*held, sequence=2), 99.0)
    return state.snapshot(100.0)


@pytest.mark.parametrize(
    ("snapshot", "goes"),
    [
        (spread_out(5, 2), False),  # higher load index, but 5 < 2 * (2 + 1): not worth a prefill
        (spread_out(6, 2), True),
        (spread_out(2, 0), True),  # an idle engine receives one of two
        (spread_out(1, 0), False),  # the last running request of an engine gains nothing by a move
        (spread_out(5, 4, e0_waiting=3), True),  # requests are waiting, so the engine has no room
    ],
)
def test_running_request_leaves_only_for_a_reason(snapshot: Snapshot, goes: bool) -> None:
    settings = FastSettings(theta=1e-9, max_moves_per_tick=64)
    assert bool(decide_balance(snapshot, settings, ACT).moves) == goes


def test_waiting_requests_need_no_reason_but_the_spread() -> None:
    moves = decide_balance(spread_out(5, 4, e0_waiting=1), FastSettings(theta=1e-9, max_moves_per_tick=1), ACT).moves
    assert [move.request for move in moves] == ["w0"]


def test_free_kv_excludes_growth_of_running_requests() -> None:
    roomy = {w.id: w.kv_free_tokens for w in balanced_workers(spread_out(3, 1), FastSettings(headroom_tokens=0))}
    kept = {w.id: w.kv_free_tokens for w in balanced_workers(spread_out(3, 1), FastSettings(headroom_tokens=500))}
    assert roomy == {"e0": 9000, "e1": 9000}
    assert kept == {"e0": 7500, "e1": 8500}
    full = balanced_workers(spread_out(3, 1, free_fraction=0.1), FastSettings(headroom_tokens=500))
    assert [worker.kv_free_tokens for worker in full] == [0, 500]


def test_engine_with_stale_report_is_excluded_and_others_are_balanced() -> None:
    state = FleetState([EngineFacts(EngineId(id), "", max_sequences=4) for id in ("e0", "e1", "e2")])
    held = [request(f"r{i}", generated=10 if i < 4 else 0) for i in range(8)]
    state.fold_gateway(gateway_report(*held, sequence=1), 80.0)
    for id, at_s in (("e0", 99.0), ("e1", 99.0), ("e2", 90.0)):
        state.fold_engine(engine_report(id, 1, sample(decode_tokens_per_s=500.0, kv_capacity_tokens=100_000)), at_s)
    state.fold_gateway(gateway_report(*held, sequence=2), 99.0)
    decision = decide_balance(state.snapshot(100.0), SETTINGS, ACT)
    assert decision.verdict.code == "spread"
    assert {move.to_engine for move in decision.balance.moves} == {"e1"}
    assert "e2" not in decision.load_index
    assert decision.inputs_age_s == pytest.approx(1.0)
    assert code(state.snapshot(107.0)) == "stale_telemetry"
