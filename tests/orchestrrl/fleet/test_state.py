"""Tests of folding reports: order, repetition, resets, several gateways, steps and ages."""

from dataclasses import replace

import pytest
from builders import GATEWAY, engine_report, finished, gateway_hello, gateway_report, request, sample
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.errors import LimitReached
from orchestrrl.core.operations import OperationId, OperationItemResult, OperationResult, OperationStatus
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.reports import GatewayReport
from orchestrrl.fleet.state import (
    FINISHED_REMEMBERED,
    LENGTHS_REMEMBERED,
    EngineFacts,
    FleetState,
    GenerationStep,
    TokenTotals,
)
from planner.model import (
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FinishedLength,
    GpuId,
    NodeId,
    RequestId,
    Snapshot,
)

E0 = EngineId("e0")


def tokens_of(snapshot: Snapshot) -> tuple[int, ...]:
    return tuple(length.tokens for length in snapshot.finished)


def engine(snapshot: Snapshot, id: str = "e0") -> EngineView:
    return next(view for view in snapshot.engines if view.id == id)


# --- properties


@given(
    order=st.permutations([(stream, sequence) for stream in range(2) for sequence in range(1, 5)]),
    repeats=st.lists(st.integers(0, 7), max_size=6),
)
def test_engine_reports_in_any_order_and_number_leave_the_newest(
    order: list[tuple[int, int]], repeats: list[int]
) -> None:
    state = FleetState()
    delivered = order + [order[i] for i in repeats]
    for at, (stream, sequence) in enumerate(delivered):
        running = 10 * stream + sequence
        state.fold_engine(engine_report("e0", sequence, sample(at, running)), float(at), stream)
    assert engine(state.snapshot(20.0)).running == 14
    assert engine(state.snapshot(20.0)).age_s == 20.0 - delivered.index((1, 4))


@st.composite
def gateway_histories(draw: st.DrawFn) -> list[GatewayReport]:
    """Generate reports of two gateways over one life of some requests: each appears, may grow, and finishes once.
    Finished requests are repeated for a while, as if acknowledgements were late."""
    reports = []
    for gateway in ("gw-a", "gw-b"):
        lives = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=5))
        repeat = draw(st.integers(1, 3))
        for at in range(12):
            live = [
                request(f"{gateway}-{i}", generated=at - start)
                for i, (start, length) in enumerate(lives)
                if start <= at <= start + length
            ]
            done = tuple(
                finished(f"{gateway}-{i}", generated=length)
                for i, (start, length) in enumerate(lives)
                if start + length < at <= start + length + repeat
            )
            reports.append(gateway_report(*live, sequence=at + 1, done=done, gateway=NodeId(gateway)))
    return reports


@given(reports=gateway_histories(), data=st.data())
def test_gateway_reports_in_any_order_and_number_count_each_finished_request_once(
    reports: list[GatewayReport], data: st.DataObject
) -> None:
    delivered = data.draw(st.permutations(reports)) + data.draw(st.lists(st.sampled_from(reports), max_size=10))
    state = FleetState()
    for at, report in enumerate(delivered):
        state.fold_gateway(report, float(at))
    assert state.totals.finished == len({(report.gateway, f.id) for report in reports for f in report.finished})
    newest = [report for report in reports if report.sequence == 12]
    assert [r.id for r in state.snapshot(50.0).requests] == sorted(r.id for report in newest for r in report.in_flight)


# --- engines


def test_decode_rate_is_the_agents_and_unknown_without_it() -> None:
    state = FleetState()
    for sequence, rate in enumerate((None, 42.0, None, 0.0), start=1):
        received = {} if rate is None else {"decode_tokens_per_s": rate}
        state.fold_engine(engine_report("e0", sequence, sample(float(sequence), total=100 * sequence, **received)), 0.0)
        assert engine(state.snapshot(1.0)).decode_tokens_per_s == rate


def test_unreadable_engine_keeps_its_last_sample_and_age() -> None:
    state = FleetState()
    state.fold_engine(engine_report("e0", 1, sample(5.0, running=3)), 5.0)
    state.fold_engine(engine_report("e0", 2, None, EngineHealth.GONE), 6.0)
    view = engine(state.snapshot(8.0))
    assert (view.health, view.running, view.age_s) == (EngineHealth.GONE, 3, 3.0)
    assert view.decode_tokens_per_s is None


def test_configured_facts_apply_if_the_engine_reports_none() -> None:
    facts = EngineFacts(E0, "http://configured", ConfigurationId("tp2"), (GpuId(0), GpuId(1)), 64, 5000)
    state = FleetState([facts])
    before = engine(state.snapshot(0.0))
    assert (before.url, before.health, before.age_s) == ("http://configured", EngineHealth.GONE, None)
    silent = replace(sample(), kv_capacity_tokens=0)
    state.fold_engine(engine_report("e0", 1, silent), 0.0)
    view = engine(state.snapshot(0.0))
    assert (view.kv_capacity_tokens, view.kv_free_tokens, view.max_sequences) == (5000, 3750, 64)
    assert (view.configuration, view.gpus, view.url) == ("tp2", (0, 1), "http://e0")
    received = EngineCapabilities("vllm", "1", ("m",), max_sequences=48)
    state.fold_engine(replace(engine_report("e0", 2, sample()), capabilities=received), 1.0)
    view = engine(state.snapshot(1.0))
    assert (view.kv_capacity_tokens, view.max_sequences) == (10_000, 48)
    state.fold_engine(engine_report("e0", 3, sample()), 2.0)
    assert state.capabilities(E0) == received  # sent only when they change


def test_engine_of_a_gateway_and_an_agent_is_one() -> None:
    state = FleetState()
    state.fold_hello(gateway_hello("e0", "e1"), 0.0)
    state.fold_engine(engine_report("e0", 1, sample()), 0.0)
    state.fold_gateway(gateway_report(request("r", "e2")), 0.0)
    assert [(view.id, view.url) for view in state.snapshot(1.0).engines] == [
        ("e0", "http://e0"),
        ("e1", ""),
        ("e2", ""),
    ]
    assert [state.reported(EngineId(id)) for id in ("e0", "e1", "e2")] == [True, False, False]


def test_silent_nodes_are_forgotten_unless_configured() -> None:
    state = FleetState([EngineFacts(EngineId("e9"), "http://e9")], forget_after_s=10.0)
    state.fold_engine(engine_report("e0", 1, sample()), 0.0)
    state.fold_gateway(gateway_report(request("r", "e1")), 0.0)
    assert [view.id for view in state.snapshot(10.0).engines] == ["e0", "e1", "e9"]
    late = state.snapshot(10.1)
    assert ([view.id for view in late.engines], late.requests, late.requests_age_s) == (["e9"], (), None)


def test_configured_engine_whose_agent_died_is_gone_and_not_waited_for() -> None:
    state = FleetState([EngineFacts(EngineId("e9"), "http://e9")], forget_after_s=10.0)
    state.fold_engine(engine_report("e9", 1, sample()), 0.0)
    for sequence in range(1, 12):
        state.fold_engine(engine_report("e0", sequence, sample()), float(sequence))
        state.fold_gateway(gateway_report(request("r"), sequence=sequence), float(sequence))
    assert (engine(state.snapshot(10.0), "e9").health, state.snapshot(10.0).inputs_age_s) == (EngineHealth.OK, 10.0)
    late = state.snapshot(11.0)
    assert (engine(late, "e9").health, late.inputs_age_s) == (EngineHealth.GONE, 0.0)
    assert engine(late, "e9").health_detail == "no report from its agent for 11 s"
    state.fold_engine(engine_report("e9", 2, sample()), 12.0)
    assert engine(state.snapshot(12.0), "e9").health is EngineHealth.OK


# --- gateways and steps


def test_gateway_report_replaces_only_its_own() -> None:
    state = FleetState()
    other = NodeId("gw2")
    state.fold_gateway(gateway_report(request("a"), request("b")), 0.0)
    state.fold_gateway(gateway_report(request("c"), gateway=other), 1.0)
    state.fold_gateway(gateway_report(request("b", "e1"), sequence=2), 2.0)
    assert [(r.id, r.engine) for r in state.snapshot(3.0).requests] == [("b", "e1"), ("c", "e0")]
    assert state.gateway_of(RequestId("b")) == GATEWAY
    assert state.gateway_of(RequestId("c")) == other
    assert state.gateway_of(RequestId("a")) is None
    assert state.snapshot(3.0).requests_age_s == 2.0
    assert (state.last_report_s(GATEWAY), state.last_report_s(NodeId("unknown"))) == (2.0, None)


def test_restarted_gateway_restarts_its_sequence() -> None:
    state = FleetState()
    state.fold_gateway(gateway_report(request("a"), sequence=900), 0.0, stream=1)
    state.fold_gateway(gateway_report(request("b"), sequence=1), 1.0, stream=2)
    state.fold_gateway(gateway_report(request("a"), sequence=901), 2.0, stream=1)
    assert [r.id for r in state.snapshot(2.0).requests] == ["b"]


def test_hello_makes_no_earlier_report_newer() -> None:
    state = FleetState()
    state.fold_gateway(gateway_report(request("a")), 1.0)
    state.fold_hello(gateway_hello("e0"), 50.0)
    snapshot = state.snapshot(51.0)
    assert (state.last_report_s(GATEWAY), snapshot.requests_age_s) == (1.0, 50.0)
    assert [r.quiet_s for r in snapshot.requests] == [50.0]


def test_reused_request_id_is_another_request() -> None:
    state = FleetState()
    for sequence, duration_s in enumerate((3.0, 3.0, 4.0), start=1):  # the first is repeated
        ended = replace(finished("a"), duration_s=duration_s)
        state.fold_gateway(gateway_report(sequence=sequence, done=(ended,)), float(sequence))
    assert state.totals.finished == 2


def test_endless_step_remembers_the_newest_lengths() -> None:
    state = FleetState()
    busy = request("always")
    for sequence in range(1, 4):
        done = tuple(finished(f"{sequence}-{i}", generated=sequence) for i in range(LENGTHS_REMEMBERED // 2))
        state.fold_gateway(gateway_report(busy, sequence=sequence, done=done), float(sequence))
    lengths = tokens_of(state.snapshot(3.0))
    assert (len(lengths), set(lengths)) == (LENGTHS_REMEMBERED, {2, 3})


def test_step_runs_from_idle_to_idle() -> None:
    state = FleetState()
    state.fold_gateway(gateway_report(sequence=1), 1.0)
    assert state.step is None
    state.fold_gateway(gateway_report(request("a"), sequence=2), 2.0)
    state.fold_gateway(gateway_report(request("b"), sequence=3, done=(finished("a", 7),)), 3.0)
    snapshot = state.snapshot(4.0)
    assert (snapshot.step_started_s, tokens_of(snapshot)) == (2.0, (7,))
    state.fold_gateway(gateway_report(sequence=4, done=(finished("b", 9),)), 5.0)
    assert state.step == GenerationStep(2.0, 5.0)
    assert state.snapshot(6.0).step_started_s is None
    assert tokens_of(state.snapshot(6.0)) == (7, 9)
    state.fold_gateway(gateway_report(request("c"), sequence=5), 7.0)
    assert tokens_of(state.snapshot(7.0)) == ()
    assert state.earlier_output_tokens == (7, 9)


def test_step_ends_when_the_last_gateway_is_idle() -> None:
    state = FleetState()
    state.fold_gateway(gateway_report(request("a")), 0.0)
    state.fold_gateway(gateway_report(request("b"), gateway=NodeId("gw2")), 1.0)
    state.fold_gateway(gateway_report(sequence=2), 2.0)
    assert state.step == GenerationStep(0.0)
    state.fold_gateway(gateway_report(sequence=2, gateway=NodeId("gw2")), 3.0)
    assert state.step == GenerationStep(0.0, 3.0)


def test_requests_between_two_reports_form_a_step() -> None:
    state = FleetState()
    state.fold_gateway(gateway_report(done=(finished("a", 3),)), 1.0)
    assert state.step == GenerationStep(1.0, 1.0)
    assert state.totals.finished == 1


def test_aborted_requests_carry_no_length_information() -> None:
    state = FleetState()
    done = (finished("a", 3, "abort"), finished("b", 4, "length"), finished("c", 0, "error"))
    state.fold_gateway(gateway_report(request("d"), done=done), 0.0)
    assert tokens_of(state.snapshot(0.0)) == (4,)
    assert state.totals.finished == 3


def test_finished_lengths_have_censoring_and_tag() -> None:
    state = FleetState()
    done = (finished("a", 3), replace(finished("b", 4, "length"), tag="math"))
    state.fold_gateway(gateway_report(request("d"), done=done), 0.0)
    assert state.snapshot(0.0).finished == (FinishedLength(3), FinishedLength(4, True, "math"))
    assert state.snapshot(0.0).finished == state.finished


def test_engines_samples_determine_steps_without_a_gateway() -> None:
    state = FleetState()
    state.fold_engine(engine_report("e0", 1, sample(running=0)), 1.0)
    assert state.snapshot(1.0).step_started_s is None
    state.fold_engine(engine_report("e0", 2, sample(running=2)), 2.0)
    assert state.snapshot(2.0).step_started_s == 2.0
    state.fold_engine(engine_report("e0", 3, sample(running=0)), 3.0)
    assert state.step == GenerationStep(2.0, 3.0)


def test_results_count_moves() -> None:
    state = FleetState()
    items = (
        OperationItemResult("a", True, recomputed_tokens=30),
        OperationItemResult("b", False, "finished before the move"),
        OperationItemResult("c", True, recomputed_tokens=1, loaded_tokens=50),
    )
    state.fold_result(OperationResult(OperationId("1"), GATEWAY, OperationStatus.PARTIAL, items=items))
    assert state.totals == TokenTotals(moves_done=2, moves_failed=1, tokens_recomputed=31, tokens_loaded=50)


# --- snapshots


def test_snapshot_has_the_age_of_its_oldest_input_and_is_immutable() -> None:
    state = FleetState()
    state.fold_engine(engine_report("e0", 1, sample()), 1.0)
    assert state.snapshot(2.0).inputs_age_s is None  # no gateway yet
    state.fold_gateway(gateway_report(request("a")), 2.0)
    snapshot = state.snapshot(4.0)
    assert snapshot.inputs_age_s == 3.0
    state.fold_engine(engine_report("e0", 2, sample(running=9)), 5.0)
    assert engine(snapshot).running == 1


def test_gone_engine_does_not_make_snapshots_stale() -> None:
    state = FleetState()
    state.fold_engine(engine_report("e0", 1, sample()), 9.0)
    state.fold_engine(engine_report("e1", 1, sample()), 0.0)
    state.fold_engine(engine_report("e1", 2, None, EngineHealth.GONE), 9.0)
    state.fold_gateway(gateway_report(request("a")), 9.0)
    assert state.snapshot(10.0).inputs_age_s == 1.0


# --- limits


def test_excess_engines_gateways_and_requests_are_refused_with_the_limit() -> None:
    state = FleetState(capacity=LimitSettings(engines=2, gateways=1, requests=3))
    for engine in ("e0", "e1"):
        state.check_engine_report(engine_report(engine), 0.0)
        state.fold_engine(engine_report(engine), 0.0)
    with pytest.raises(LimitReached, match=r"engine_id: at most 2 engines .* \(limits.engines\), got 3 with 'e2'"):
        state.check_engine_report(engine_report("e2"), 1.0)
    state.check_engine_report(engine_report("e1", 2), 1.0)
    with pytest.raises(
        LimitReached, match=r"in_flight: must have at most 3 requests across all gateways \(limits.requests\), got 4"
    ):
        state.check_gateway_report(gateway_report(*(request(f"r{n}") for n in range(4))), 1.0)
    with pytest.raises(LimitReached, match=r"engines \(limits.engines\)|limits.engines"):
        state.check_gateway_report(gateway_report(request("r", "e9")), 1.0)
    state.check_gateway_report(gateway_report(request("r")), 1.0)
    state.fold_gateway(gateway_report(request("r")), 1.0)
    with pytest.raises(LimitReached, match=r"gateway_id: at most 1 gateways .* \(limits.gateways\), got 'gw2'"):
        state.check_gateway_report(gateway_report(gateway=NodeId("gw2")), 1.0)
    with pytest.raises(LimitReached, match=r"\(limits.engines\)"):
        state.check_hello(gateway_hello("e0", "e5"), 1.0)


def test_forgotten_nodes_free_capacity_and_reporting_ones_stay() -> None:
    state = FleetState([EngineFacts(EngineId("configured"), "http://c")], 60.0, LimitSettings(engines=3, gateways=1))
    state.fold_engine(engine_report("old"), 0.0)
    state.fold_engine(engine_report("new"), 50.0)
    state.fold_gateway(gateway_report(request("r", "old")), 0.0)
    state.check_engine_report(engine_report("next"), 61.0)
    state.fold_engine(engine_report("next"), 61.0)
    assert [view.id for view in state.engines(61.0)] == ["configured", "new", "next"]
    state.check_gateway_report(gateway_report(gateway=NodeId("gw2")), 61.0)


def test_newest_of_many_finished_requests_are_remembered() -> None:
    state, many = FleetState(), FINISHED_REMEMBERED + 5000
    done = tuple(finished(f"f{n}") for n in range(many))
    state.fold_gateway(gateway_report(done=done), 0.0)
    state.fold_gateway(gateway_report(done=done[5000:], sequence=2), 1.0)
    assert state.totals.finished == many
    state.fold_gateway(gateway_report(done=done[4999:5000], sequence=3), 2.0)
    assert state.totals.finished == many + 1
