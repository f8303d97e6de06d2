"""Tests of a small cluster: stages, loop, faults, summary rows, and the daemon configuration derived from it."""

from itertools import pairwise
from pathlib import Path

import pytest

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.daemon.configuration import load_config
from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.results import Bill, ClusterResult, as_text, pareto, parse, rows
from orchestrrl.lab.sim.rl.run import run_cluster
from orchestrrl.lab.sim.rl.scenario import scenario_of
from orchestrrl.lab.sim.rl.stages import write_daemon
from orchestrrl.lab.sim.run import chosen
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

# The scenario that most tests use, with a single arm.
HEALTHY = scenario_of(document())


@pytest.fixture(scope="module")
def healthy() -> ClusterResult:
    (result,) = run_cluster(HEALTHY)
    return result


def ran(**changes: object) -> ClusterResult:
    return run_cluster(scenario_of(document(**changes)))[0]


def test_every_stage_runs_and_every_sample_is_trained_on(healthy: ClusterResult) -> None:
    run = healthy.run
    assert (run.fabric, run.arm, run.seed, run.samples) == ("fat_tree", "verl_to", 1, 32)
    assert run.staleness == {0: 16, 1: 16}
    assert all(step["gen_s"] > 0 and step["train_s"] > 0 for step in run.steps)
    assert {span.stage for span in run.spans} == {
        FabricStage.GEN,
        FabricStage.TRAIN,
    }  # the third step would have new weights
    assert sum(healthy.train_parts_s.values()) == pytest.approx(run.steps[0]["train_s"])
    assert sum(healthy.sync_phases_s.values()) > 0
    assert healthy.bill.network_usd == pytest.approx(sum(healthy.bill.parts_usd.values()))
    assert run.tier_bytes["train"]["nic"] > 0


def test_results_are_deterministic(healthy: ClusterResult) -> None:
    text = as_text(HEALTHY.document(), [healthy])
    assert as_text(HEALTHY.document(), run_cluster(HEALTHY)) == text
    assert as_text(HEALTHY.document(), parse(text)) == text
    (other,) = run_cluster(HEALTHY.model_copy(update={"seeds": (2,)}))
    assert other.run.seconds != healthy.run.seconds


def test_synchronous_step_is_the_sum_of_its_stages(healthy: ClusterResult) -> None:
    run = ran(loop__mode="synchronous").run
    stages_s = sum(step["gen_s"] + step["train_s"] + step["sync_s"] for step in run.steps)
    assert run.seconds == pytest.approx(stages_s)
    assert run.staleness == {0: 32}
    assert run.samples_per_s < healthy.run.samples_per_s


def test_idle_gpus_of_pods_are_noted() -> None:
    """Engines have two servers, and six servers generate in PoDs of three. Only in a tree may engines span PoDs."""
    results = run_cluster(
        scenario_of(
            document(
                cluster={"train_gpus": 16, "gen_gpus": 24, "gpus_per_server": 4, "nics_per_server": 4},
                cluster__servers_per_pod=3,
                fabrics=["rfabric", "fat_tree"],
                generation__layouts=["tp8"],
                generation__arms=["verl_to", "both"],
            )
        )
    )
    notes = {(each.run.fabric, each.run.arm): [note for note in each.run.notes if "tp8" in note] for each in results}
    idle = "2 x tp8 stay inside PoDs, which leaves 8 of 24 GPUs idle"
    few, all_of_them = "weight sync to 2 x tp8", "weight sync to 3 x tp8"
    assert notes == {
        ("rfabric", "verl_to"): [few, idle],
        ("rfabric", "both"): [few, f"{idle}; plans ignore PoDs, and may use them"],
        ("fat_tree", "verl_to"): [all_of_them],
        ("fat_tree", "both"): [all_of_them],
    }


def test_shared_gpus_train_and_generate_alternately() -> None:
    changed = document(loop__mode="synchronous", cluster__shared=True)
    del changed["cluster"]["gen_gpus"]
    (result,) = run_cluster(scenario_of(changed))
    spans = sorted((span.begin_s, span.end_s) for span in result.run.spans)
    assert all(sooner[1] <= later[0] + 1e-9 for sooner, later in pairwise(spans))


def test_partial_rollout_loses_no_samples() -> None:
    result = ran(generation__arms=["partial_rollout"], generation__partial_share=0.6, loop__steps=3)
    begun = 3 * 16
    assert result.run.samples < begun
    assert f"{begun - result.run.samples} samples were begun but not trained on before the end" in result.run.notes
    assert max(result.run.staleness) == 2  # samples interrupted in the first or second step


def test_bounded_buffer_and_small_batches() -> None:
    loop = {"mode": "bounded_staleness", "staleness": 3, "batch_samples": 8, "steps": 2, "warmup_steps": 1}
    run = ran(loop=loop).run
    assert run.samples == 32
    assert max(run.staleness) <= 3
    with pytest.raises(Permanent, match="no room in a buffer of 8 samples"):
        ran(loop={**loop, "buffer_samples": 8})


def test_failed_training_server_restarts_the_iteration(healthy: ClusterResult) -> None:
    begin_s = healthy.run.steps[0]["gen_s"]
    fault = {"at_s": begin_s + 0.01, "fail": "server", "of": 0, "back_after_s": 1}
    run = ran(faults=[fault], training__recovery_s=30.0).run
    assert run.steps[0]["train_s"] == pytest.approx(healthy.run.steps[0]["train_s"] + 30.01)
    assert [(span.stage, span.label) for span in run.spans if span.lane == "fault"] == [(FabricStage.TRAIN, "server 0")]


def test_half_of_the_engines_generate_at_half_speed(healthy: ClusterResult) -> None:
    fault = {"at_s": 0, "fail": "server", "of": 3}
    assert ran(faults=[fault]).run.steps[0]["gen_s"] == pytest.approx(2 * healthy.run.steps[0]["gen_s"])


def test_failed_nics_slow_training(healthy: ClusterResult) -> None:
    run = ran(faults=[{"at_s": 0, "fail": "nic", "of": [0, 1, 2, 3, 4, 5, 6]}]).run
    assert run.steps[0]["train_s"] > healthy.run.steps[0]["train_s"]
    assert run.steps[0]["gen_s"] == healthy.run.steps[0]["gen_s"]


def test_stage_that_never_ends_is_reported() -> None:
    with pytest.raises(Permanent, match="fat_tree, verl_to: the stage that begins at 0 s never ends"):
        ran(faults=[{"at_s": 0, "fail": "server", "of": [2, 3]}])


def test_rows_are_medians_relative_to_the_first() -> None:
    results = run_cluster(scenario_of(document(seeds=[1, 2, 3], fabrics=["fat_tree", "oversubscribed"])))
    first, second = rows(results)
    assert (first.fabric, first.seeds, first.gain) == ("fat_tree", 3, 1.0)
    assert first.samples_per_s == sorted(each.samples_per_s for each in results[:3])[1]
    assert second.gain == pytest.approx(second.samples_per_s / first.samples_per_s)
    assert rows([]) == []


def test_pareto_excludes_dominated_points() -> None:
    assert pareto([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (1.0, 0.5), (2.0, 3.0)]) == [True, True, False, False, True]


def test_bill_total_includes_gpus() -> None:
    assert Bill(2.0, {}, 3.0).total_usd == 5.0


def test_unknown_names_are_rejected() -> None:
    assert chosen([], ["a", "b"], "--fabrics") == ["a", "b"]
    assert chosen(["b", "a", "b"], ["a", "b"], "--fabrics") == ["b", "a"]
    with pytest.raises(ProblemFaults, match=r"--fabrics\[1\]: must be one of a, b, got 'c'"):
        chosen(["a", "c"], ["a", "b"], "--fabrics")


def test_simulated_engines_can_be_written_as_a_daemon_configuration(tmp_path: Path) -> None:
    path, beside = write_daemon(HEALTHY, None, tmp_path / "new" / "daemon.yaml")
    config = load_config(path)
    assert [str(each.id) for each in config.fleet.configuration_values()] == ["tp2", "tp4"]
    assert config.fleet.gpus is not None
    assert (config.fleet.gpus.count, config.mode) == (16, "act")
    assert beside.name == config.fleet.profile
    with pytest.raises(ProblemFaults, match=r"--fabric: must be one of fat_tree, got 'torus'"):
        write_daemon(HEALTHY, "torus", path)
