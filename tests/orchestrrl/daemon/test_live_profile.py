"""Tests that costs of engines are learned at run time: applied if notable, journalled, and used by plans."""

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from builders import engine_report, gateway_report, request, sample
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.store import EntryKind, Journal, JournalReader
from orchestrrl.core.operations import (
    MoveRequests,
    OperationId,
    OperationItemResult,
    OperationResult,
    OperationStatus,
)
from orchestrrl.daemon import planning
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.live_profile import MOVE_FIXED, LiveProfile
from orchestrrl.daemon.metrics import DaemonCollector
from orchestrrl.daemon.wiring import Daemon, build_daemon
from orchestrrl.engines.profiles.store import write_profile
from orchestrrl.fleet.membership_changes import engine_facts
from orchestrrl.fleet.move_orders import moved_requests
from orchestrrl.fleet.redeployment.book import EngineStart
from orchestrrl.fleet.state import FleetState
from orchestrrl.lab.sim.engines import EngineKind, fleet_section, homogeneous, kinds_of
from orchestrrl.lab.sim.run import steps_of
from orchestrrl.lab.sim.scenario import GenerationScenario, parse_scenario
from orchestrrl.lab.sim.world import World
from planner.cost.profile import (
    Curve,
    EngineProfile,
    MoveCosts,
    Parallelism,
    Profile,
    ProfileSource,
    Provenance,
    StepTime,
)
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    MoveMethod,
    NodeId,
    RequestId,
    RequestMove,
    RequestView,
    Snapshot,
)
from planner.move_methods import FIXED_PRIOR_S, PRIOR_COUNTS_FOR
from planner.solver.from_snapshot import NO_TRANSFER
from planner.sync_tree.network import LeftForMoves

TP2 = "{id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000, max_sequences: 64, \
prefill_tokens_per_s: 9000, switch_s: 1.5}"
CONFIG = f"""
fleet:
  gpus: {{count: 4}}
  configurations: [{TP2}]
  engines:
    - {{id: e0, url: "http://e0", configuration: tp2, gpus: [0, 1]}}
    - {{id: e1, url: "http://e1", configuration: tp2, gpus: [2, 3]}}
"""
GIVEN = parse_config(CONFIG).fleet.configuration_values()[0]
ID = GIVEN.id


class Bench:
    """A LiveProfile, and engines of known speed that feed it."""

    def __init__(self, config: str = CONFIG) -> None:
        self.notes: list[tuple[ConfigurationId, dict[str, Any]]] = []
        self.costs = LiveProfile(
            parse_config(config).fleet, lambda *note: self.notes.append(note), lambda: "2026-01-31"
        )
        self._now_s = 0.0
        self._sequence = 0

    def decode(
        self,
        factor: float,
        batches: int,
        running: int = 16,
        engine: str = "e0",
        health: EngineHealth = EngineHealth.OK,
        configuration: ConfigurationId | None = ID,
    ) -> None:
        """Observe this many batches, each of other sizes, scraped once a second, from an engine `factor` times the
        speed."""
        for turn in range(batches):
            sequences, usage = max(1, running - turn % 8), 0.2 + 0.05 * (turn % 5)
            step_s = factor * GIVEN.step_s(sequences, round(usage * GIVEN.kv_capacity_tokens))
            total = 0
            for _ in range(3):
                self._sequence += 1
                fields = {"kv_usage_fraction": usage, "kv_capacity_tokens": GIVEN.kv_capacity_tokens}
                reading = sample(self._now_s, sequences, 0, total, **fields)
                self.costs.observe(engine_report(engine, self._sequence, reading, health), configuration)
                steps = max(1, round(1.0 / step_s))
                self._now_s += steps * step_s
                total += sequences * steps

    @property
    def line(self) -> Configuration:
        self.costs.refit([EngineId("e0"), EngineId("e1")])
        (line,) = self.costs.cost_estimates().lines(snapshot_of(CONFIG), 4)
        return line


def snapshot_of(config: str, *requests: RequestView) -> Snapshot:
    state = FleetState(engine_facts(parse_config(config)))
    state.fold_gateway(gateway_report(*requests), 0.0)
    return state.snapshot(0.0)


@pytest.mark.parametrize("factor", [0.6, 1.5, 2.5])
def test_other_step_times_are_learned(factor: float) -> None:
    bench = Bench()
    bench.decode(factor, 40)
    line = bench.line
    for sequences, kv_tokens in ((4, 10_000), (16, 40_000)):
        assert line.step_s(sequences, kv_tokens) == pytest.approx(factor * GIVEN.step_s(sequences, kv_tokens), rel=0.05)
    ((configuration, body),) = bench.notes
    assert configuration == ID
    assert body["step_time_factor"] == pytest.approx(factor, rel=0.05)
    assert 60 < body["samples"] <= bench.costs.estimates()[0].taken == 80  # of one load, only the newest few count
    (note,) = bench.costs.notes()
    assert f"re-fitted to {body['samples']} batches" in note
    (estimate,) = bench.costs.estimates()
    assert (estimate.refitted, estimate.profile.provenance.source) == (True, ProfileSource.MEASURED)


def test_unchanged_step_times_stay_exact() -> None:
    bench = Bench()
    for turn in range(20):
        bench.decode(1.02 if turn % 2 else 0.985, 4)
    assert bench.line == GIVEN
    assert bench.notes == []
    assert bench.costs.notes() == ()
    (estimate,) = bench.costs.estimates()
    assert estimate.predicted_ratio == pytest.approx(1.0, abs=0.03)
    assert estimate.taken == 160


def test_few_batches_do_not_suffice() -> None:
    bench = Bench()
    bench.decode(2.0, 3)
    assert bench.line == GIVEN


def test_learned_step_times_settle() -> None:
    """One entry per change, for any duration."""
    bench = Bench()
    for turn in range(10):
        bench.decode(1.5 * (1.01 if turn % 2 else 0.99), 20)
        assert bench.line != GIVEN
    assert len(bench.notes) == 1
    bench.decode(1.0, 700)
    assert bench.line.step_s(16, 30_000) == pytest.approx(GIVEN.step_s(16, 30_000), rel=0.05)
    assert len(bench.notes) >= 2


def test_large_deviation_is_applied_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        bench.decode(4.0, 40)
        assert bench.line.alpha_s == pytest.approx(4 * GIVEN.alpha_s, rel=0.2)
    assert "tp2: step times are 4 times the profile's" in caplog.text
    assert "is it an engine of this configuration?" in caplog.text


def test_implausible_steps_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        bench.decode(0.02, 20)
    assert bench.line == GIVEN
    assert len(caplog.records) == 1
    (estimate,) = bench.costs.estimates()
    assert (estimate.taken, estimate.refused) == (0, 40)


@pytest.mark.parametrize(
    "wrong", [{"health": EngineHealth.SLOW}, {"configuration": None}, {"configuration": ConfigurationId("tp9")}]
)
def test_engines_without_samples_change_nothing(wrong: dict[str, Any]) -> None:
    bench = Bench()
    bench.decode(2.0, 30, **wrong)
    assert bench.line == GIVEN
    assert bench.costs.estimates()[0].taken == 0


def test_one_slow_engine_of_four_does_not_determine_the_estimate() -> None:
    bench = Bench()
    for _ in range(10):
        bench.decode(1.0, 6, engine="e0")
        bench.decode(1.0, 6, engine="e1")
        bench.decode(1.0, 6, engine="e2")
        bench.decode(3.0, 6, engine="e3")
    assert bench.line.step_s(14, 30_000) == pytest.approx(GIVEN.step_s(14, 30_000), rel=0.1)


turns = st.tuples(st.floats(0, 5), st.sampled_from([0, 8, 8, 8, 40]), st.integers(-100, 5000), st.floats(-0.1, 0.2))


@given(st.lists(turns, max_size=80))
def test_lines_stay_usable_for_any_samples(reported: list[tuple[float, int, int, float]]) -> None:
    """Clocks that stand still, counters that decrease, batches of any speed."""
    bench, at_s, total, usage = Bench(), 0.0, 0, 0.1
    for sequence, (elapsed_s, running, made, grown) in enumerate(reported):
        at_s, total, usage = at_s + elapsed_s, max(0, total + made), min(1.0, max(0.0, usage + grown))
        fields = {"kv_usage_fraction": usage, "kv_capacity_tokens": 100_000}
        bench.costs.observe(engine_report("e0", sequence, sample(at_s, running, 0, total, **fields)), ID)
    line = bench.line  # a Configuration validates itself
    (estimate,) = bench.costs.estimates()
    assert estimate.refitted == bool(bench.notes)
    assert line == GIVEN or estimate.refitted
    assert 1 / 20 <= estimate.factor <= 20


def test_scrapes_within_a_step_are_combined() -> None:
    """A step has ten scrapes, each of which sees one step or none: only many together determine the step time."""
    bench, step_s = Bench(), 2.0 * GIVEN.step_s(8, 20_000)
    for scrape in range(3000):
        at_s = scrape * step_s / 10
        fields = {"kv_usage_fraction": 0.2, "kv_capacity_tokens": 100_000}
        reading = sample(at_s, 8, 0, 8 * int(at_s / step_s), **fields)
        bench.costs.observe(engine_report("e0", scrape + 1, reading), ID)
    assert bench.line.step_s(8, 20_000) == pytest.approx(2.0 * GIVEN.step_s(8, 20_000), rel=0.05)
    (estimate,) = bench.costs.estimates()
    assert estimate.taken == pytest.approx(3000 / 10 * step_s / 0.5, rel=0.1)


def test_reload_forgets_only_what_depends_on_the_change() -> None:
    bench = Bench()
    bench.decode(1.5, 40)
    learnt = bench.line
    bench.costs.configured(parse_config(CONFIG.replace("http://e1", "http://elsewhere")).fleet)
    assert bench.line == learnt
    bench.costs.configured(parse_config(CONFIG.replace("alpha_s: 0.02", "alpha_s: 0.03")).fleet)
    assert bench.line == replace(GIVEN, alpha_s=0.03)


def profile(*configurations: EngineProfile) -> Profile:
    recompute_s = Curve((0.0, 9000.0), (0.0, 1.0))
    moves = MoveCosts(1.0, Curve((0.0, 1e9), (0.0, 1.0)), recompute_s, Provenance(ProfileSource.MEASURED, "2026-01-01"))
    return Profile("m", "g", "e", configurations, moves)


def bent(tp: int = 2) -> EngineProfile:
    """Return a profile as of an engine with experts: the first few sequences cause most of a step."""
    return EngineProfile(
        ConfigurationId(f"bent{tp}"),
        Parallelism(tp=tp),
        StepTime(Curve((1.0, 8.0, 64.0), (0.01, 0.04, 0.05)), 1e-8),
        9000.0,
        1_000_000,
        64,
        1.0,
        Provenance(ProfileSource.IMPORTED, "2026-01-01", "tables", 10, 0.015, 0.05),
    )


@pytest.fixture
def profiled(tmp_path: Path) -> str:
    write_profile(tmp_path / "profile.yaml", profile(bent()))
    return f"fleet: {{gpus: {{count: 4}}, profile: {tmp_path / 'profile.yaml'}}}"


def test_moves_to_one_engine_are_prefilled_together(profiled: str) -> None:
    bench = Bench(profiled)
    pairs = [("a", "e1"), ("b", "e1"), ("c", "e0"), ("queued", "e0"), ("lost", "e0")]
    action = MoveRequests(tuple(RequestMove(RequestId(r), EngineId("e2"), EngineId(to)) for r, to in pairs))
    for tokens in (1000, 2000, 4000, 1500, 3000):
        items = (
            OperationItemResult(
                "a", True, "", tokens, tokens / 3000
            ),  # 3 s for every 9,000 tokens, twice of them together
            OperationItemResult("b", True, "", tokens // 2, 1.5 * tokens / 3000),
            OperationItemResult("c", True, "", tokens, tokens / 3000),
            OperationItemResult("queued", True, "", 0, 5.0),
            OperationItemResult("lost", False, "gone", 7000, 5.0),
        )
        done = OperationResult(OperationId("o"), NodeId("gw"), OperationStatus.DONE, items=items)
        bench.costs.moved(moved_requests(0.0, action.moves, done.items), lambda engine: None)
    moves = bench.costs.moves()
    assert moves is not None
    assert moves.recompute_s.at(3000) == pytest.approx(1.0, rel=0.05)
    assert moves.provenance is not None
    assert moves.provenance.samples == 10


def test_kv_transfer_is_possible_only_if_configured(profiled: str) -> None:
    assert Bench().costs.moving() == replace(NO_TRANSFER, recompute_fixed_s=FIXED_PRIOR_S)
    transfer = Bench(profiled).costs.moving()
    assert (transfer.inter_node_gbps_per_gpu, transfer.intra_node_gbps_per_gpu) == (0.0, 0.0)
    assert transfer.rebuilt_tokens == Curve((0.0, 2048.0, 9000.0), (0.0, 2048.0, 9000.0))
    linked = profiled.replace("gpus:", "kv_transfer: {intra_node_gbps_per_gpu: 900.0, kv_bytes_per_token: 4.0}, gpus:")
    bench = Bench(linked)
    transfer = bench.costs.moving(nic_share=0.5)
    assert transfer.inter_node_gbps_per_gpu == pytest.approx(4.0)  # half of the profile's
    assert (transfer.intra_node_gbps_per_gpu, transfer.transfer_fixed_s) == (900.0, FIXED_PRIOR_S)
    assert transfer.kv_bytes_per_token == 4.0
    bench.costs.configured(parse_config(profiled).fleet)
    assert bench.costs.moving().intra_node_gbps_per_gpu == 0.0


def moved(bench: Bench, method: MoveMethod | None, loaded: int, recomputed: int, seconds: float) -> None:
    """Return one finished move to an engine of two GPUs."""
    action = MoveRequests((RequestMove(RequestId("r"), EngineId("e2"), EngineId("e0"), method=MoveMethod.TRANSFER),))
    items = (OperationItemResult("r", True, "", recomputed, seconds, method, loaded),)
    done = OperationResult(OperationId("o"), NodeId("gw"), OperationStatus.DONE, items=items)
    bench.costs.moved(moved_requests(0.0, action.moves, done.items), lambda engine: ConfigurationId("bent2"))


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_transfers_are_learned_only_from_kv_moves(profiled: str, factor: float) -> None:
    """Configured: 80 Gbit/s for each of two GPUs and 0.1 s per transfer, 1 MB a token: 5e-5 s each."""
    links = "kv_transfer: {inter_node_gbps_per_gpu: 80.0, latency_s: 0.1, kv_bytes_per_token: 1.0e+6}, gpus:"
    bench = Bench(profiled.replace("gpus:", links))
    for tokens in (1000, 2000, 4000, 8000, 12_000) * 3:
        moved(bench, MoveMethod.TRANSFER, tokens, 1, factor * (0.1 + 5e-5 * tokens))
        moved(bench, None, 0, 0, 7.0)  # without a known method
    transfer = bench.costs.moving()
    assert transfer.inter_node_gbps_per_gpu == pytest.approx(80.0 / factor, rel=0.1)
    wire_s = 8000 * transfer.kv_bytes_per_token * 8 / (2 * transfer.inter_node_gbps_per_gpu * 1e9)
    assert transfer.transfer_fixed_s + wire_s == pytest.approx(factor * 0.5, rel=0.1)
    assert bench.costs.moves() == Bench(profiled).costs.moves()  # no recomputation was learned
    half = bench.costs.moving(nic_share=0.5)
    assert half.inter_node_gbps_per_gpu == pytest.approx(transfer.inter_node_gbps_per_gpu / 2)


def test_failed_kv_transfer_is_a_sample_of_recomputation(profiled: str) -> None:
    links = "kv_transfer: {inter_node_gbps_per_gpu: 80.0, latency_s: 0.1, kv_bytes_per_token: 1.0e+6}, gpus:"
    bench = Bench(profiled.replace("gpus:", links))
    before = bench.costs.moving()
    for tokens in (1000, 2000, 4000, 8000, 12_000) * 3:
        moved(bench, MoveMethod.RECOMPUTE, 0, tokens, tokens / 3000)
    moves = bench.costs.moves()
    assert moves is not None
    assert moves.recompute_s.at(3000) == pytest.approx(1.0, rel=0.05)
    after = bench.costs.moving()
    assert (after.inter_node_gbps_per_gpu, after.transfer_fixed_s) == (
        before.inter_node_gbps_per_gpu,
        before.transfer_fixed_s,
    )


def test_bent_curve_follows_the_step_into_its_tail(profiled: str) -> None:
    bench = Bench(profiled)
    cost_estimates = bench.costs.cost_estimates()
    assert not cost_estimates.straight
    for count in (64, 8, 2):
        snapshot = snapshot_of(profiled, *(request(f"r{i:03d}") for i in range(count)))
        (line,) = cost_estimates.lines(snapshot, 4, [1000.0] * count)
        assert line.step_s(count // 2, 0) == pytest.approx(bent().step.at(count // 2, 0), rel=0.05)
    (note,) = bench.costs.notes()
    assert note == "step times of bent2: imported, 2026-01-01, error 1.5%"


def recompute(bench: Bench, tokens: int, seconds: float, to: str = "e0") -> None:
    """Return one finished move."""
    action = MoveRequests((RequestMove(RequestId("r"), EngineId("e2"), EngineId(to)),))
    items = (OperationItemResult("r", True, "", tokens, seconds),)
    done = OperationResult(OperationId("o"), NodeId("gw"), OperationStatus.DONE, items=items)
    bench.costs.moved(
        moved_requests(0.0, action.moves, done.items), lambda engine: ID if engine.startswith("e") else None
    )


@given(st.floats(0.2, 5.0), st.floats(0, 0.3), st.randoms(use_true_random=False))
def test_prefill_is_learned_from_moves_apart_from_their_wait(factor: float, waits_s: float, random: Random) -> None:
    """A tenth of the moves waited for a seat."""
    bench = Bench()
    rate = factor * GIVEN.prefill_tokens_per_s
    for turn in range(60):
        tokens = random.randrange(500, 20_000)
        seconds = (waits_s + tokens / rate) * random.uniform(0.97, 1.03)
        recompute(bench, tokens, seconds + (20.0 if turn % 10 == 9 else 0.0))
    line = bench.line
    notable = abs(factor - 1) > 0.15
    if notable:
        assert line.prefill_tokens_per_s == pytest.approx(rate, rel=0.12)
        ((_, body),) = bench.notes
        assert (body["figure"], body["configured"]) == ("prefill_tokens_per_s", GIVEN.prefill_tokens_per_s)
        assert bench.costs.notes()[0].startswith(f"prefill of tp2: {line.prefill_tokens_per_s:,.0f} tokens/s")
    assert replace(line, prefill_tokens_per_s=GIVEN.prefill_tokens_per_s) == GIVEN  # step times stay exact


def test_configured_prefill_stays_if_confirmed() -> None:
    bench = Bench()
    for turn in range(80):
        tokens = 500 * (1 + turn % 12)
        recompute(bench, tokens, tokens / GIVEN.prefill_tokens_per_s * (1.06 if turn % 2 else 0.95))
        assert bench.line == GIVEN
    assert bench.notes == []
    for turn in range(40):
        recompute(bench, 500 * (1 + turn % 12), 99.0, to="stranger")
    assert bench.line == GIVEN


def test_prefill_is_not_learned_from_moves_dominated_by_other_time() -> None:
    """Prefill of 500 to 6,000 tokens is 0.06 to 0.7 s of moves that take 2 to 6 s: only the fixed part can be
    learned."""
    bench, random = Bench(), Random(3)
    for _ in range(60):
        tokens = random.randrange(500, 6000)
        recompute(bench, tokens, random.uniform(2.0, 6.0) + tokens / GIVEN.prefill_tokens_per_s)
        assert bench.line == GIVEN
    assert bench.notes == []


def predicted(bench: Bench, method: MoveMethod, context_s: float, seconds: float, fixed_s: float = 0.0) -> None:
    """Return one finished move whose context was predicted to take `context_s`."""
    order = RequestMove(RequestId("r"), EngineId("e2"), EngineId("e0"), 0.0, method, context_s + fixed_s, 0.0, fixed_s)
    items = (OperationItemResult("r", True, "", 0, seconds, method),)
    done = OperationResult(OperationId("o"), NodeId("gw"), OperationStatus.DONE, items=items)
    bench.costs.moved(moved_requests(0.0, (order,), done.items), lambda engine: ID)


def test_fixed_part_of_moves_is_learned_per_method() -> None:
    links = "kv_transfer: {inter_node_gbps_per_gpu: 80.0, latency_s: 0.1, kv_bytes_per_token: 1.0e+6}"
    bench = Bench(CONFIG.replace("fleet:", f"fleet:\n  {links}"))
    transfer = bench.costs.moving()
    assert transfer.recompute_fixed_s == bench.costs.recompute_fixed_s == FIXED_PRIOR_S
    assert transfer.transfer_fixed_s == pytest.approx(0.1 + FIXED_PRIOR_S)
    for turn in range(12):
        fixed_s = bench.costs.recompute_fixed_s  # the predicted fixed part makes no difference
        predicted(bench, MoveMethod.RECOMPUTE, 0.2, 100.0 if turn % 5 == 4 else 0.2 + 0.06, fixed_s)
    transfer = bench.costs.moving()
    assert transfer.recompute_fixed_s == bench.costs.recompute_fixed_s == pytest.approx(0.06)
    assert transfer.transfer_fixed_s == pytest.approx(0.1 + FIXED_PRIOR_S)
    for _ in range(6):
        predicted(bench, MoveMethod.TRANSFER, 0.3, 0.3 + 0.4)
    assert bench.costs.moving().transfer_fixed_s == pytest.approx(0.4)
    last = {body["method"]: body["value"] for _, body in bench.notes if body["figure"] == MOVE_FIXED}
    assert last == {"recompute": pytest.approx(0.06), "transfer": pytest.approx(0.4)}
    assert "moving a running request by recompute: 0.06 s plus its context, by the latest 12 orders to move" in (
        bench.costs.notes()
    )


def test_moves_of_one_order_count_as_one() -> None:
    """Otherwise a stall that all of them share would count as typical."""
    bench = Bench()
    names = [RequestId(f"r{n}") for n in range(8)]
    orders = tuple(RequestMove(name, EngineId("e2"), EngineId("e0"), predicted_s=0.2) for name in names)
    items = tuple(OperationItemResult(name, True, "", 0, 5.2, MoveMethod.RECOMPUTE) for name in names)
    done = OperationResult(OperationId("o"), NodeId("gw"), OperationStatus.DONE, items=items)
    for _ in range(PRIOR_COUNTS_FOR - 1):
        bench.costs.moved(moved_requests(0.0, orders, done.items), lambda engine: ID)
        assert bench.costs.recompute_fixed_s == FIXED_PRIOR_S
    for _ in range(2):
        bench.costs.moved(moved_requests(0.0, orders, done.items), lambda engine: ID)
    assert bench.costs.recompute_fixed_s == pytest.approx(5.0)


def test_restarted_daemon_recovers_the_learned_fixed_part(tmp_path: Path) -> None:
    config, clock = parse_config(CONFIG), VirtualClock(1000.0)
    for learns in (True, False):
        with closing(Journal(tmp_path / "journal.sqlite", clock.now_s())) as journal:
            parts = build_daemon(config, journal, clock)
            plane = parts.control_plane
            order = RequestMove(RequestId("r"), EngineId("e0"), EngineId("e1"), predicted_s=0.5)
            item = OperationItemResult("r", True, "", 900, 0.75, MoveMethod.RECOMPUTE)
            done = OperationResult(OperationId("o"), NodeId("gw"), OperationStatus.DONE, items=(item,))
            if learns:
                for _ in range(5):
                    plane.planning.costs.moved(moved_requests(0.0, (order,), done.items), lambda engine: ID)
            assert plane.planning.costs.recompute_fixed_s == pytest.approx(0.25)


def test_impossible_figure_is_ignored() -> None:
    bench = Bench()
    for turn in range(40):
        recompute(bench, 500 * (1 + turn % 12), (1 + turn % 12) * 50.0)
    assert bench.line == GIVEN


def prefill_beside_decoding(
    bench: Bench, rate: float, turns: int, factor: float = 1.0, waiting: int = 0, random: Random | None = None
) -> None:
    """Eight sequences; at each second scrape, new prompts have been prefilled in place of ended answers."""
    random = random or Random(1)
    at_s, decoded, prompts = 0.0, 0, 0
    fields = {"kv_usage_fraction": 0.3, "kv_capacity_tokens": GIVEN.kv_capacity_tokens}
    step_s = factor * GIVEN.step_s(8, 30_000)
    for turn in range(turns):
        steps, tokens = random.randrange(10, 30), random.randrange(4000, 12_000) if turn % 2 else 0
        at_s, decoded, prompts = at_s + steps * step_s + tokens / rate, decoded + 8 * steps, prompts + tokens
        reading = replace(sample(at_s, 8, waiting, decoded, **fields), prompt_tokens_total=prompts)
        bench.costs.observe(engine_report("e0", turn + 1, reading), ID)


@pytest.mark.parametrize("factor", [0.4, 3.0])
@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_prefill_is_learned_from_scrapes_with_much_of_it(factor: float, slower: float) -> None:
    """This holds if steps are as configured, and if not."""
    bench = Bench()
    rate = factor * GIVEN.prefill_tokens_per_s
    bench.decode(slower, 60, running=8)
    prefill_beside_decoding(bench, rate, 60, slower)
    assert bench.line.prefill_tokens_per_s == pytest.approx(rate, rel=0.1)
    assert bench.notes[-1][1]["figure"] == "prefill_tokens_per_s"


def test_prefill_while_requests_wait_is_ignored() -> None:
    bench = Bench()
    prefill_beside_decoding(bench, 3 * GIVEN.prefill_tokens_per_s, 60, waiting=1)
    assert bench.line == GIVEN


def test_moves_take_precedence_over_prompts_for_prefill() -> None:
    bench = Bench()
    prefill_beside_decoding(bench, 3 * GIVEN.prefill_tokens_per_s, 60)
    assert bench.line.prefill_tokens_per_s == pytest.approx(3 * GIVEN.prefill_tokens_per_s, rel=0.1)
    for turn in range(20):
        recompute(bench, 500 * (1 + turn % 12), 500 * (1 + turn % 12) / (0.5 * GIVEN.prefill_tokens_per_s))
    assert bench.line.prefill_tokens_per_s == pytest.approx(0.5 * GIVEN.prefill_tokens_per_s, rel=0.1)


def test_start_duration_is_learned_from_a_few_starts() -> None:
    bench = Bench()
    for elapsed_s in (41.0, 44.0):
        bench.costs.started([EngineStart(ID, elapsed_s, GIVEN.switch_s)])
    bench.costs.started([EngineStart(ConfigurationId("tp9"), 3.0, 1.5), EngineStart(ID, 3.0, 99.0)])
    assert bench.line == GIVEN
    bench.costs.started([EngineStart(ID, 300.0, GIVEN.switch_s)])  # one had to fetch its image
    assert bench.line == replace(GIVEN, switch_s=44.0)
    bench.costs.started([EngineStart(ID, 45.0, GIVEN.switch_s)])
    assert bench.line.switch_s == 44.0  # 44.5: no notable change
    ((_, body),) = bench.notes
    assert (body["figure"], body["value"], body["configured"], body["samples"]) == ("switch_s", 44.0, 1.5, 3)
    assert bench.costs.notes() == ("starting tp2: 44 s, configured 1.5 s, by 3 samples of starts, 2026-01-31",)


def test_steps_on_crowded_links_are_ignored() -> None:
    bench = Bench()
    for sequence in range(1, 100):
        fields = {"kv_usage_fraction": 0.2, "kv_capacity_tokens": 100_000}
        reading = sample(float(sequence), 8, 0, 8 * 20 * sequence, **fields)
        bench.costs.observe(engine_report("e0", sequence, reading), ID, crowded_links=sequence % 10 != 0)
    assert bench.costs.estimates()[0].taken == 0


# --- in the daemon


SCENARIO = """
name: learning
gpus: 8
gpus_per_node: 4
workload: {prompts: 12, samples: 4, prompt_tokens: [16, 64], max_tokens: 3000, correlation: 0.5,
           lengths: {kind: lognormal, median_tokens: 500, sigma: 0.8}}
engines:
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1.0e-4, gamma_s: 1.0e-7, kv_capacity_tokens: 65536, max_sequences: 16,
       prefill_tokens_per_s: 9000, switch_s: 1.0}
daemon:
  mode: act
  slow: {interval_s: 10.0, epsilon_s: 1.0, max_output_tokens: 3000, work_budget: 100, knowledge: oracle,
         correct_predictions: false}
"""


def slowed(kind: EngineKind, factor: float) -> EngineKind:
    """Return what such an engine really is: slower than configured by this factor."""
    step = kind.profile.step
    base_s = Curve(step.base_s.xs, tuple(factor * y for y in step.base_s.ys))
    step = StepTime(base_s, factor * step.kv_s_per_token)
    return replace(kind, profile=replace(kind.profile, step=step))


async def one_step(
    scenario: GenerationScenario, factor: float, journal: Path, *, curve: Curve | None = None
) -> tuple[World, list[tuple[float, float, float]]]:
    """Return a step's plans: when each was made in it, and its predicted and actual seconds to the end. With a `curve`
    of its step times, the engine has a profile."""
    reported = kinds_of(scenario)
    (name,) = reported
    if curve is not None:
        step_time = replace(reported[name].profile.step, base_s=curve)
        reported[name] = replace(reported[name], profile=replace(reported[name].profile, step=step_time))
    real = {name: slowed(reported[name], factor)}
    fleet = fleet_section(scenario, reported)
    if curve is not None:  # with its curve, while the daemon's configuration can only hold a line
        dated = replace(reported[name].profile, provenance=Provenance(ProfileSource.MEASURED, "2026-01-01"))
        write_profile(journal.with_suffix(".yaml"), profile(dated))
        fleet = {"gpus": fleet["gpus"], "profile": str(journal.with_suffix(".yaml"))}
    (requests,) = steps_of(scenario, 1)
    known = {one.id: one.output_tokens for one in requests}
    world = World(scenario.daemon_config(fleet), real, scenario, journal, known_output_tokens=known)
    world.deploy(name, homogeneous(real[name], scenario.gpus, scenario.gpus_per_node))
    async with world:
        step = await world.run_step(requests)
        page = generate_latest(_registry(world.daemon)).decode()
        assert f'orchestrrl_profile_batches_total{{configuration="{name}",result="taken"}}' in page
        assert f'orchestrrl_profile_predicted_step_ratio{{configuration="{name}"}}' in page
    reader = JournalReader(journal)
    made = {entry.subject: entry.at_s for entry in reader.since(0, (EntryKind.PLAN,))}
    outcomes = [
        (
            made[entry.subject] - step.started_s,
            entry.body["predicted_makespan_s"],
            entry.body["actual_makespan_s"],
        )
        for entry in reader.since(0, (EntryKind.PLAN_ACTUAL,))
        if entry.body["predicted_makespan_s"]
    ]
    reader.close()
    return world, sorted(outcomes)


def _registry(parts: Daemon) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(DaemonCollector(parts))
    return registry


async def test_plans_predict_slower_engines(tmp_path: Path) -> None:
    world, outcomes = await one_step(parse_scenario(SCENARIO), 1.5, tmp_path / "journal.sqlite")
    (estimate,) = world.control_plane.planning.costs.estimates()
    assert estimate.factor == pytest.approx(1.5, rel=0.05)
    _, first_s, elapsed_s = outcomes[0]
    assert elapsed_s / first_s == pytest.approx(1.5, rel=0.1)  # as in the profile
    later = [(predicted_s, actual_s) for at_s, predicted_s, actual_s in outcomes if at_s > 25 and actual_s > 10]
    assert later
    assert all(predicted_s == pytest.approx(actual_s, rel=0.1) for predicted_s, actual_s in later)
    reader = JournalReader(tmp_path / "journal.sqlite")
    (refit,) = reader.since(0, (EntryKind.PROFILE_REFITTED,))
    assert refit.subject == "tp2"
    noted = reader.since(0, (EntryKind.PLAN,))[-1].body["notes"]
    reader.close()
    assert any("re-fitted" in note for note in noted)


@pytest.mark.parametrize("factor", [1.0, 1.5])
async def test_plans_predict_engines_with_bent_step_times(tmp_path: Path, factor: float) -> None:
    curve = Curve((1.0, 4.0, 16.0, 64.0), (0.008, 0.02, 0.04, 0.05))
    text = SCENARIO.replace("max_sequences: 16", "max_sequences: 64").replace("prompts: 12", "prompts: 48")
    _, outcomes = await one_step(parse_scenario(text), factor, tmp_path / "journal.sqlite", curve=curve)
    later = [(predicted_s, actual_s) for at_s, predicted_s, actual_s in outcomes if factor == 1.0 or at_s > 10]
    missed_s = sum(abs(predicted_s - actual_s) for predicted_s, actual_s in later)
    assert len(later) >= 5
    assert missed_s < 0.1 * sum(actual_s for _, actual_s in later)


async def test_engines_that_match_their_profile_are_unchanged(tmp_path: Path) -> None:
    world, _ = await one_step(parse_scenario(SCENARIO), 1.0, tmp_path / "journal.sqlite")
    (estimate,) = world.control_plane.planning.costs.estimates()
    assert not estimate.refitted
    assert estimate.predicted_ratio == pytest.approx(1.0, abs=0.03)
    assert estimate.taken > 20


@pytest.mark.parametrize(("crowded_below", "misled"), [(planning.NICS_CROWDED, False), (0.0, True)])
async def test_weight_traffic_is_not_learned_as_slower_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowded_below: float, misled: bool
) -> None:
    """New weights arrive over NICs that engines decode over. Without the limit, that slowdown is attributed to the
    engines."""
    monkeypatch.setattr(planning, "NICS_CROWDED", crowded_below)
    network = "network: {nic_gbps_per_node: 100, weight_gbytes: 60}\nengines:"
    reported = SCENARIO.replace("engines:", network).replace("switch_s: 1.0}", "switch_s: 1.0, nic_gbps: 40}")
    world, _ = await one_step(parse_scenario(reported), 1.0, tmp_path / "journal.sqlite")
    (estimate,) = world.control_plane.planning.costs.estimates()
    with closing(JournalReader(tmp_path / "journal.sqlite")) as reader:
        learnt = [entry.body["step_time_factor"] for entry in reader.since(0, (EntryKind.PROFILE_REFITTED,))]
    assert estimate.taken > 5
    assert bool(learnt) == misled, learnt


@pytest.mark.parametrize("hands_over", [False, True])
async def test_plans_transfer_only_between_engines_that_can(tmp_path: Path, hands_over: bool) -> None:
    """All requests begin on one engine of four, and only plans spread them."""
    scenario = parse_scenario(SCENARIO.replace("mode: act", "mode: act\n  fast: {policy: none}"))
    kinds = kinds_of(scenario)
    (name,) = kinds
    fleet = fleet_section(scenario, kinds)
    if hands_over:
        fleet["kv_transfer"] = {"inter_node_gbps_per_gpu": 200.0, "kv_bytes_per_token": 200_000.0}
    (requests,) = steps_of(scenario, 1)
    known = {one.id: one.output_tokens for one in requests}
    path = tmp_path / "journal.sqlite"
    world = World(scenario.daemon_config(fleet), kinds, scenario, path, known_output_tokens=known)
    world.deploy(name, homogeneous(kinds[name], scenario.gpus, scenario.gpus_per_node))
    async with world:
        await world.run_step(requests[:16], [EngineId("e0")] * 16)
    reader = JournalReader(tmp_path / "journal.sqlite")
    methods = {move["method"] for entry in reader.since(0, (EntryKind.PLAN,)) for move in entry.body["moves"]}
    reader.close()
    assert methods == ({"transfer"} if hands_over else {"recompute"})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", 0.0) as made:
        yield made


async def test_late_report_is_ignored(journal: Journal) -> None:
    parts = build_daemon(parse_config(CONFIG), journal, VirtualClock(0.0))
    plane = parts.control_plane
    for sequence, at_s, total in ((1, 0.0, 0), (3, 10.0, 4000), (2, 5.0, 3999), (4, 20.0, 8000)):
        fields = {"kv_usage_fraction": 0.2, "kv_capacity_tokens": 100_000}
        plane.fleet.engine_reported(engine_report("e0", sequence, sample(at_s, 8, 0, total, **fields)), 1)
    assert plane.planning.costs.estimates()[0].taken == 2


async def test_samples_on_crowded_links_are_ignored(journal: Journal) -> None:
    parts = build_daemon(parse_config(CONFIG), journal, VirtualClock(0.0))
    plane = parts.control_plane
    for sequence in range(1, 40):
        plane.planning.share_nics(
            LeftForMoves(0.45 if sequence < 20 else 0.55)
        )  # more is needed than exists; there is enough
        fields = {"kv_usage_fraction": 0.2, "kv_capacity_tokens": 100_000}
        plane.fleet.engine_reported(
            engine_report("e0", sequence, sample(float(sequence), 8, 0, 160 * sequence, **fields)), 1
        )
    assert plane.planning.costs.estimates()[0].taken == 19


async def test_learned_start_duration_is_recovered_by_the_next_daemon(journal: Journal) -> None:
    for engine, expected_s in (("e5", 1.5), ("e6", 1.5), ("e7", 1.5), ("e8", 2.0)):
        body = {"done": True, "configuration": ID, "elapsed_s": 30.0, "expected_s": expected_s}
        journal.append(0.0, EntryKind.ENGINE_STARTED, engine, body)
    journal.append(0.0, EntryKind.ENGINE_STARTED, "e9", {"done": False, "detail": "no such image"})
    parts = build_daemon(parse_config(CONFIG), journal, VirtualClock(0.0))
    plane = parts.control_plane
    plane.planning.costs.refit([])
    assert [line.switch_s for line in plane.planning.costs.cost_estimates().as_written.values()] == [30.0]
