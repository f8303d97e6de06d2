"""Tests of the fast loop's packing: its inputs, its fallback without them, and whole steps that end sooner."""

from dataclasses import replace

import pytest

from balancer.balance import BalanceDecision, BalanceSituation, PolicyInForce, decide_balance
from orchestrrl.core.config.schema import FastSettings
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FastPolicy,
    Mode,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
    StepTimeEstimates,
)
from tests.balancer.whole_steps import TIGHT, Setting, descending, makespans_by_arm, preempted_share

TP2 = Configuration(ConfigurationId("tp2"), 2, 0.0184, 8.1e-5, 4.1e-8, 582_885, 1024, 18_000.0, 1.7)
SETTINGS = FastSettings()
NONE = FastSettings(policy=FastPolicy.NONE)
PAPER = FastSettings(policy=FastPolicy.PAPER)


def view(name: str, requests: int, **changes: object) -> EngineView:
    engine = EngineView(
        id=EngineId(name),
        url="",
        configuration=TP2.id,
        health=EngineHealth.OK,
        running=requests,
        waiting=0,
        kv_capacity_tokens=500_000,
        kv_free_tokens=300_000,
        max_sequences=1024,
        decode_tokens_per_s=requests / TP2.step_s(requests, requests * 2_100),
        age_s=0.1,
    )
    return replace(engine, **changes)  # type: ignore[arg-type]


def fleet(*counts: int, moves: int = 0) -> Snapshot:
    """Return a fleet with the given number of requests on each engine, each with 2,000 generated tokens."""
    return Snapshot(
        now_s=100.0,
        engines=tuple(view(f"e{place}", count) for place, count in enumerate(counts)),
        requests=tuple(
            RequestView(
                RequestId(f"r{place}-{i:02d}"), EngineId(f"e{place}"), RequestState.RUNNING, 100, 2_000, moves=moves
            )
            for place, count in enumerate(counts)
            for i in range(count)
        ),
        requests_age_s=0.1,
        step_started_s=0.0,
    )


def knowing(snapshot: Snapshot, **changes: object) -> BalanceSituation:
    situation = BalanceSituation(
        Mode.ACT, configurations=(TP2,), remaining_tokens={request.id: 4_000.0 for request in snapshot.requests}
    )
    return replace(situation, **changes)  # type: ignore[arg-type]


def decided(
    snapshot: Snapshot, situation: BalanceSituation | None = None, settings: FastSettings = SETTINGS
) -> BalanceDecision:
    return decide_balance(snapshot, settings, situation or knowing(snapshot))


def test_packing_moves_requests_and_reports_the_gain() -> None:
    decision = decided(fleet(30, 4))
    assert decision.verdict.code == "pack"
    assert {(m.from_engine, m.to_engine) for m in decision.moves} == {("e0", "e1")}
    assert len(decision.moves) == SETTINGS.max_moves_to_engine
    assert decision.packing is not None
    assert decision.packing.makespan_after_s < decision.packing.makespan_before_s
    assert f"{decision.packing.makespan_before_s:.1f} s" in decision.verdict.detail


def test_packing_reports_load_indices_of_the_papers_rule() -> None:
    few = FastSettings(max_moves_per_tick=3)
    packed, paper = decided(fleet(30, 4), settings=few), decided(fleet(30, 4), settings=PAPER)
    assert packed.load_index == paper.load_index
    assert packed.balance.load_after != packed.balance.load_before
    assert packed.balance.stopped_because == "max_moves"


def test_even_load_is_not_changed() -> None:
    decision = decided(fleet(10, 10))
    assert (decision.verdict.code, decision.moves) == ("no_gain", ())


def test_advice_names_the_moves_and_holds() -> None:
    snapshot = fleet(30, 4)
    decision = decided(snapshot, knowing(snapshot, mode=Mode.ADVISE))
    assert decision.verdict.code == "advise_only"
    assert decision.moves


@pytest.mark.parametrize(
    "changes", [{"configurations": ()}, {"remaining_tokens": {}}, {"remaining_tokens": {RequestId("r0-00"): 5.0}}]
)
def test_without_step_times_or_lengths_the_papers_rule_decides(changes: dict[str, object]) -> None:
    snapshot = fleet(30, 4)
    decision = decided(snapshot, knowing(snapshot, **changes))
    assert decision.packing is None
    assert decision.moves == decided(snapshot, settings=PAPER).moves


def test_the_policy_in_force_has_a_name_and_a_reason() -> None:
    snapshot = fleet(30, 4)
    prior = StepTimeEstimates("prior", "prior: qwen2.5-14b on H800, TP=2")
    sources = {EngineId("e0"): StepTimeEstimates("configured", "configured: tp2"), EngineId("e1"): prior}
    assert decided(snapshot, knowing(snapshot, step_times=sources)).policy == PolicyInForce(
        "packing", "step times of all engines are known; 1 x configured: tp2; 1 x prior: qwen2.5-14b on H800, TP=2"
    )
    assert decided(snapshot, settings=PAPER).policy == PolicyInForce("load_index", "fast.policy is paper")
    assert decided(snapshot, settings=NONE).policy == PolicyInForce("none", "fast.policy is none")


def test_load_index_policy_reports_its_reason() -> None:
    snapshot = fleet(5, 4)
    why = {EngineId("e1"): StepTimeEstimates("", "the engine runs on CPUs; learnt from 8 observed batches, 3 so far")}
    unknown = replace(snapshot, engines=(snapshot.engines[0], replace(snapshot.engines[1], configuration=None)))
    stalled = replace(snapshot, engines=(replace(snapshot.engines[0], decode_tokens_per_s=0.0), snapshot.engines[1]))
    gone = replace(snapshot, engines=tuple(replace(view, age_s=60.0) for view in snapshot.engines))
    reasons = {
        decided(unknown, knowing(unknown, step_times=why)).policy,
        decided(stalled).policy,
        decided(gone).policy,
        decided(snapshot, knowing(snapshot, remaining_tokens={RequestId("r0-00"): 5.0})).policy,
    }
    assert {policy.name for policy in reasons} == {"load_index"}
    assert {policy.reason for policy in reasons} == {
        "no step times for e1: the engine runs on CPUs; learnt from 8 observed batches, 3 so far",
        "the end times of stalled engines cannot be predicted: e0",
        "no healthy engine has fresh reports",
        "the remaining length of request r0-01 is unknown",
    }


def test_stalled_engine_is_handled_by_the_papers_rule() -> None:
    snapshot = fleet(5, 4)
    stalled = replace(snapshot, engines=(replace(snapshot.engines[0], decode_tokens_per_s=0.0), snapshot.engines[1]))
    decision = decided(stalled)
    assert decision.packing is None
    assert decision.moves == decided(stalled, settings=PAPER).moves != ()


def test_engines_without_fresh_reports_are_excluded() -> None:
    snapshot = fleet(30, 4, 0)
    old = replace(snapshot, engines=(*snapshot.engines[:2], replace(snapshot.engines[2], age_s=60.0)))
    assert {move.to_engine for move in decided(old).moves} == {"e1"}


def test_requests_that_moved_too_often_stay() -> None:
    assert decided(fleet(30, 4, moves=SETTINGS.max_moves_per_request)).moves == ()


def test_far_slower_engine_is_relieved_unless_all_are_equally_slow() -> None:
    snapshot = fleet(10, 10, 10)
    rates = [engine.decode_tokens_per_s or 0.0 for engine in snapshot.engines]

    def at(*factors: float) -> Snapshot:
        pairs = zip(snapshot.engines, rates, factors, strict=True)
        return replace(
            snapshot, engines=tuple(replace(engine, decode_tokens_per_s=rate * f) for engine, rate, f in pairs)
        )

    assert {move.from_engine for move in decided(at(0.3, 1.0, 1.0)).moves} == {"e0"}
    assert decided(at(50.0, 50.0, 50.0)).moves == ()


def test_no_policy_moves_nothing() -> None:
    decision = decided(fleet(30, 4), settings=NONE)
    assert (decision.verdict.code, decision.moves) == ("no_policy", ())


class TestSteps:
    SETTING = Setting(24, 800.0, 6_000, 24_000)

    def test_packing_ends_sooner_than_static_and_an_oracle_sooner_still(self) -> None:
        totals: dict[str, float] = {}
        for seed in (1, 2, 3, 4):
            for arm, makespan_s in makespans_by_arm(self.SETTING, self.SETTING.requests(seed)).items():
                totals[arm] = totals.get(arm, 0.0) + makespan_s
        assert totals["oracle"] <= totals["packing"] <= totals["paper"] <= totals["static"]

    def test_filling_in_descending_order_places_every_request_once(self) -> None:
        requests = self.SETTING.requests(3)
        placed = [id for ids in descending(self.SETTING.kind.profile.configuration(), requests, 8) for id in ids]
        assert sorted(placed) == sorted(request.id for request in requests)

    def test_length_based_headroom_causes_fewer_preemptions(self) -> None:
        by_lengths, by_headroom = (preempted_share(TIGHT, 4, lengths_known=known) for known in (True, False))
        assert 0 <= by_lengths < by_headroom <= 1
