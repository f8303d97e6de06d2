"""Tests of simulated steps under the real control plane: completeness, determinism, failures, and reports."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.store import JournalReader
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.lab.sim.engines import homogeneous
from orchestrrl.lab.sim.report import as_json, marks
from orchestrrl.lab.sim.run import ControlledRun, NotKnowing, SeedRun, run_scenario, steps_of
from orchestrrl.lab.sim.scenario import GenerationFaultSection, GenerationScenario, NetworkSection, load_scenario
from orchestrrl.lab.sim.world import World
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism
from tests.orchestrrl.lab.sim.gen_scenarios import kinds, scenario


def run(of: GenerationScenario, arm: str, seed: int = 1, journal: Path | None = None) -> SeedRun:
    """Run an arm. ControlledRun checks that every request has exactly one complete answer."""
    initial = ConfigurationId(of.engines.initial or "narrow")
    return ControlledRun(of, kinds(of), initial, arm, seed, steps_of(of, seed)).run(lambda *_: None, journal)


def entries(path: Path) -> list[tuple[object, ...]]:
    reader = JournalReader(path)
    try:
        return [(e.at_s, e.generation, e.kind, e.subject, e.body) for e in reader.since(0, limit=1_000_000)]
    finally:
        reader.close()


def test_same_seed_writes_the_same_journal(tmp_path: Path) -> None:
    of = scenario()
    first, second = (run(of, "both", journal=tmp_path / name) for name in ("a.sqlite", "b.sqlite"))
    assert entries(tmp_path / "a.sqlite") == entries(tmp_path / "b.sqlite")
    assert first == second
    assert run(of, "both", seed=2).journal_digest != first.journal_digest


@pytest.mark.parametrize("arm", ["planning", "balancing", "balancing_paper", "both", "oracle"])
def test_every_arm_answers_all_requests(arm: str) -> None:
    of = scenario()
    done = run(of, arm)
    requests = steps_of(of, 1)[0]
    assert done.samples == len(requests)
    assert done.output_tokens == sum(request.output_tokens for request in requests)
    assert done.remaining[-1][1] == 0
    assert 0 <= done.idle_fraction < 1


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.floats(1, 40), st.integers(0, 7), st.none() | st.floats(1, 20)), max_size=5))
def test_engine_failures_lose_no_requests(strikes: list[tuple[float, int, float | None]]) -> None:
    """Engine e7 always restarts, so that at least one engine survives."""
    faults = tuple(
        GenerationFaultSection(at_s=at_s, kill_engine=f"e{index}", back_after_s=2.0 if index == 7 else back_s)
        for at_s, index, back_s in strikes
    )
    run(scenario(faults=faults), "balancing")


def test_engine_failure_is_in_the_journal(tmp_path: Path) -> None:
    of = scenario(faults=(GenerationFaultSection(at_s=5.0, kill_engine="e0", back_after_s=5.0),))
    run(of, "balancing", journal=tmp_path / "journal.sqlite")
    health = [
        body["health"]
        for _, _, kind, subject, body in entries(tmp_path / "journal.sqlite")  # type: ignore[index]
        if kind == "engine.health" and subject == "e0"
    ]
    assert health == ["ok", "gone", "ok"]


def test_restarted_engine_is_a_new_span() -> None:
    of = scenario(faults=(GenerationFaultSection(at_s=5.0, kill_engine="e0", back_after_s=5.0),))
    before, after = (span for span in run(of, "balancing").spans if span.engine == "e0")
    assert before.ended_s <= after.started_s - 5.0


def test_transferred_kv_is_not_recomputed() -> None:
    slow_prefill = [c.model_copy(update={"prefill_tokens_per_s": 500.0}) for c in scenario().engines.configurations]
    engines = scenario().engines.model_copy(update={"configurations": tuple(slow_prefill)})
    by_recompute = run(scenario(engines=engines), "balancing_paper")
    handed = run(scenario(engines=engines, network=NetworkSection(kv_transfer=True)), "balancing_paper")
    assert by_recompute.moves
    assert by_recompute.transfers == 0
    assert handed.tokens_recomputed == 0


def test_cost_of_sharing_nics_is_reported() -> None:
    network = NetworkSection(kv_transfer=True, weight_gbytes=30.0, nic_gbps_per_node=100.0)
    outcome = run_scenario(scenario(network=network), ["verl_to", "both"], [1], lambda *_: None)
    assert outcome.contention_s is not None
    assert run_scenario(scenario(), ["both"], [1], lambda *_: None).contention_s is None


def test_contention_scenario_costs_time_and_is_noted_in_plans(tmp_path: Path) -> None:
    of = load_scenario("contention")
    outcome = run_scenario(of, ["verl_to", "both"], [1], lambda *_: None)
    assert outcome.contention_s is not None
    assert 0 < outcome.contention_s < 0.1 * outcome.arms[1].makespan_s
    assert any("sharing the NICs adds" in line for line in marks(outcome))
    run(of, "both", journal=tmp_path / "journal.sqlite")
    plans = [body for _, _, kind, _, body in entries(tmp_path / "journal.sqlite") if kind == "plan"]  # type: ignore[index]
    notes = [note for plan in plans for note in plan["notes"] if "NICs" in note]
    # New weights arrive as a step begins; after that only expert traffic remains.
    assert notes[0] == (
        "moves have 36% of the NICs: weight sync and engines' own traffic take the rest, "
        "and KV between nodes is priced at 2.8 times its time"
    )
    assert any(
        note.startswith("moves have 56% of the NICs: engines' own traffic takes the rest, and") for note in notes
    )


def test_price_of_unknown_lengths_is_reported() -> None:
    arms = ["verl_to", "mean_only", "both", "oracle"]
    outcome = run_scenario(scenario(), arms, [1], lambda *_: None)
    found = outcome.not_knowing
    assert found is not None
    both, mean, oracle = (outcome.arm(name) for name in ("both", "mean_only", "oracle"))
    assert both is not None
    assert oracle is not None
    assert mean is not None
    assert found.price_s == both.makespan_s - oracle.makespan_s
    assert found.mean_s == mean.makespan_s
    assert as_json(outcome)["not_knowing"]["kept"] == found.kept
    assert 1 <= as_json(outcome)["ceiling"]["gain"] <= as_json(outcome)["ceiling"]["gain_vs_verl_to"]
    assert any("of the oracle's gain" in line or "nothing to keep" in line for line in marks(outcome))
    assert run_scenario(scenario(), ["verl_to", "both"], [1], lambda *_: None).not_knowing is None


@pytest.mark.parametrize(
    ("static_s", "forecast_s", "oracle_s", "kept"),
    [(100.0, 90.0, 80.0, 0.5), (100.0, 100.0, 80.0, 0.0), (100.0, 110.0, 80.0, -0.5), (100.0, 90.0, 100.0, None)],
)
def test_kept_is_the_fraction_of_the_oracles_gain(
    static_s: float, forecast_s: float, oracle_s: float, kept: float | None
) -> None:
    assert NotKnowing(static_s, forecast_s, oracle_s, None).kept == kept


async def test_gpu_is_never_used_by_two_engines(tmp_path: Path) -> None:
    of = scenario()
    job = ControlledRun(of, kinds(of), ConfigurationId("narrow"), "both", 1, steps_of(of, 1))
    world = World(job.config(), kinds(of), of, tmp_path / "journal.sqlite")
    world.deploy(ConfigurationId("narrow"), homogeneous(kinds(of)[ConfigurationId("narrow")], 8, 4))
    async with world:
        with pytest.raises(Permanent, match="in use: 0 by e0"):
            await world.deployment._deployer.start(
                EngineSpec(EngineId("x"), ConfigurationId("wide"), Parallelism(tp=4), tuple(map(GpuId, range(4))))
            )


@pytest.mark.parametrize(("kind", "starts"), [("narrow", list(range(8))), ("wide", [0, 4])])
def test_homogeneous_fleet_uses_every_gpu_once(kind: str, starts: list[int]) -> None:
    fleet = homogeneous(kinds(scenario())[ConfigurationId(kind)], 8, 4)
    assert [gpus[0] for gpus in fleet.values()] == starts
    assert sorted(gpu for gpus in fleet.values() for gpu in gpus) == list(range(8))


def test_static_baselines_use_the_best_and_the_widest_configuration() -> None:
    outcome = run_scenario(
        scenario(), ["verl_to", "verl_lo", "partial_rollout", "packed_known"], [1, 2], lambda *_: None
    )
    tuned, widest, partial, packed = outcome.arms
    assert tuned.makespan_s == min(outcome.static_makespan_s.values())
    assert widest.configuration == "wide"
    assert packed.makespan_s <= tuned.makespan_s
    assert all(0 <= run.seeds[0].idle_fraction < 1 for run in outcome.arms)
    assert (outcome.gain(partial) or 0) > 1
