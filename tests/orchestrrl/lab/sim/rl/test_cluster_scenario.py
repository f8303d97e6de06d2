"""Tests of cluster scenarios: all faults at once with their paths."""

import pytest
import yaml

from orchestrrl.core.documents import parse_yaml
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.rl.faults import ClusterFaultSchedule, ClusterFaultSection, FaultyPart
from orchestrrl.lab.sim.rl.scenario import (
    FOLDER,
    layout_named,
    load_cluster_scenario,
    scenario_of,
)
from orchestrrl.lab.sim.scenario import scenario_names
from planner.cost.predict import identifier
from planner.cost.profile import Parallelism
from tests.orchestrrl.lab.sim.rl.cluster_builders import TEXT, document


def faults_of(changed: dict[str, object]) -> list[str]:
    with pytest.raises(ProblemFaults) as caught:
        scenario_of(changed)
    return caught.value.faults


def paths(changed: dict[str, object]) -> set[str]:
    return {fault.split(":")[0] for fault in faults_of(changed)}


@pytest.mark.parametrize("name", scenario_names(FOLDER))
def test_built_in_scenarios_are_valid(name: str) -> None:
    scenario = load_cluster_scenario(name)
    assert scenario.name.startswith(name)
    assert f"{scenario.cluster.gpus}" in name


def test_derived_values_of_a_scenario() -> None:
    scenario = scenario_of(parse_yaml(TEXT))
    assert scenario.servers.gpus == 32
    assert scenario.train_layout.dp == 4
    assert scenario.samples == 16
    assert [identifier(layout) for layout in scenario.engine_layouts] == ["tp2", "tp4"]
    assert scenario.train_job(16, 200.0).micro_batches == 4


def test_document_of_a_scenario_parses_to_the_same_scenario() -> None:
    scenario = scenario_of(document(faults=[{"at_s": 1, "fail": "nic", "of": 3}]))
    assert scenario_of(yaml.safe_load(yaml.safe_dump(scenario.document()))) == scenario
    assert scenario.schedule == ClusterFaultSchedule((ClusterFaultSection(at_s=1.0, fail=FaultyPart.NIC, of=(3,)),))
    assert scenario.faults[0].fail is FaultyPart.NIC


def test_all_faults_are_reported_at_once() -> None:
    changed = document(
        model="gpt-9",
        surprise=1,
        cluster__gen_gpus=12,
        generation__layouts=["tp2", "wide"],
        generation__workload__max_tokens=0,
        loop__mode="bounded_staleness",
        weight_sync={"holds": "everybody", "scheme": "flood"},
        faults=[{"at_s": -1, "fail": "sky", "of": []}],
        daemon={"fast": {"interval_s": -1}, "fleet": {}},
    )
    assert paths(changed) == {
        "model",
        "surprise",
        "cluster",
        "generation.layouts[1]",
        "generation.workload.max_tokens",
        "loop",
        "weight_sync.holds",
        "weight_sync.scheme",
        "faults[0].at_s",
        "faults[0].fail",
        "faults[0].of",
        "daemon.fast.interval_s",
        "daemon.fleet",
    }


def test_unknown_scheme_is_rejected() -> None:
    assert faults_of(document(weight_sync={"scheme": "flood"})) == [
        "weight_sync.scheme: must be one of tree, naive, two_stage, got 'flood'"
    ]


def test_faults_between_sections_are_reported() -> None:
    changed = document(
        training={"tp": 3, "ep": 2},
        generation__layouts=["tp2", "tp64", "tp12"],
        generation__initial="tp4",
        fabrics=["fat_tree", "fat_tree", "torus", {"kind": "oversubscribed", "options": {"ratio": -1, "colour": 1}}],
        faults=[{"at_s": 1, "fail": "nic", "of": [3, 32]}, {"at_s": 1, "fail": "server", "of": 1, "share": 0.5}],
    )
    assert paths(changed) == {
        "training",
        "generation.layouts[1]",
        "generation.layouts[2]",
        "generation.initial",
        "fabrics[1].name",
        "fabrics[2].kind",
        "fabrics[3].options.ratio",
        "fabrics[3].options.colour",
        "faults[0].of",
        "faults[1].share",
    }
    assert any(
        fault.startswith("training.ep") or "ep must divide" in fault
        for fault in faults_of(document(training={"tp": 4, "ep": 2}))
    )


def test_cluster_sizes_apply_to_every_fabric() -> None:
    kinds = ["fat_tree", "oversubscribed", "rail_optimized", "mixnet", "rfabric"]
    fabrics = [*kinds, {"kind": "fat_tree", "name": "own", "options": {"servers_per_tor": 1}}]
    scenario = scenario_of(document(cluster__servers_per_tor=2, cluster__servers_per_pod=4, fabrics=fabrics))
    options = [scenario.fabric_options(section) for section in scenario.fabrics]
    assert [each["servers_per_tor"] for each in options] == [2, 2, 2, 2, 2, 1]
    assert [each["servers_per_pod"] for each in options] == [4] * 6


def test_cluster_sizes_unknown_to_a_fabric_are_rejected() -> None:
    changed = document(cluster__servers_per_tor=2, cluster__servers_per_pod=4, fabrics=["fat_tree", "topoopt"])
    assert faults_of(changed) == [
        "cluster.servers_per_tor: is not an option of fabrics[1] (topoopt); set it in the others, got 2",
        "cluster.servers_per_pod: is not an option of fabrics[1] (topoopt); set it in the others, got 4",
    ]
    (fault,) = faults_of(document(cluster__servers_per_tor=5))
    assert fault.startswith("cluster.servers_per_tor: in fabrics[0] (fat_tree): must be <= 4: a ToR of 64 ports")
    own = [{"kind": "fat_tree", "options": {"servers_per_tor": 5}}]
    assert paths(document(fabrics=own)) == {"fabrics[0].options.servers_per_tor"}


def test_failures_of_unknown_uplinks_are_reported() -> None:
    """TopoOpt has no uplinks, so that their failures have no effect."""
    faults = [
        {"at_s": 1, "fail": "tor_uplinks", "of": [0, 77], "share": 0.5},
        {"at_s": 1, "fail": "pod_uplinks", "of": 1},
    ]
    changed = document(fabrics=["rfabric", "fat_tree", "topoopt"], faults=faults)
    assert faults_of(changed) == [
        "faults[0].of: must be less than the number of ToRs of fabrics[0] (rfabric), got 77",
        "faults[0].of: must be less than the number of ToRs of fabrics[1] (fat_tree), got 77",
        "faults[1].of: must be less than the number of PoDs of fabrics[1] (fat_tree), got 1",
    ]
    assert len(scenario_of(document(fabrics=["rfabric"], faults=faults[1:])).faults) == 1


def test_training_that_exceeds_memory_is_reported() -> None:
    changed = document(model="qwen2.5-72b")
    (fault,) = faults_of(changed)
    assert fault.startswith("training: needs at least ")
    assert fault.endswith("but h800 has 80: raise tp or pp")
    scenario_of(document(model="qwen2.5-72b", gpu="b300"))
    scenario_of(document(model="qwen2.5-72b", training={"tp": 8, "pp": 2}))


def test_updates_are_limited_by_samples() -> None:
    assert faults_of(document(training={"tp": 4, "updates": 17})) == [
        "training.updates: must be at most the 16 samples of a training step, got 17"
    ]
    interleaved = {"tp": 4, "pp": 2, "vpp": 2}
    scenario_of(document(training=interleaved))
    assert any("vpp > 1 needs" in fault for fault in faults_of(document(training={**interleaved, "updates": 16})))


def test_steps_belong_to_the_loop() -> None:
    assert faults_of(document(generation__workload__steps=3))[0].startswith(
        "generation: workload must not have steps; the section loop has them"
    )
    assert paths(document(loop={"steps": 2, "warmup_steps": 2})) == {"loop"}


def test_shared_gpus_require_the_synchronous_mode() -> None:
    changed = document(cluster__shared=True)
    assert paths(changed) == {"cluster"}
    del changed["cluster"]["gen_gpus"]
    assert paths(changed) == {"loop"}
    changed["loop"]["mode"] = "synchronous"
    shared = scenario_of(changed)
    assert (shared.cluster.gpus, shared.cluster.generating) == (16, range(16))


@pytest.mark.parametrize("text", ["- 1", "name: [", "generation: 3\ndaemon: 4\nfabrics: 1\n", "fabrics: [1]\n"])
def test_malformed_documents_are_reported_as_faults(text: str) -> None:
    with pytest.raises(ProblemFaults):
        scenario_of(parse_yaml(text))


def test_unknown_name_lists_known_names() -> None:
    with pytest.raises(ProblemFaults, match="cluster64"):
        load_cluster_scenario("cluster65")
    with pytest.raises(ProblemFaults, match=r"generation.profile: .*paper-14b-h800"):
        scenario_of(document(generation__profile="paper-15b", generation__layouts=[]))


@pytest.mark.parametrize(
    "layout",
    [
        Parallelism(tp=8),
        Parallelism(tp=8, ep=8),
        Parallelism(dp=16, ep=16),
        Parallelism(attention_gpus=24, ffn_gpus=16, micro_batches=3),
        Parallelism(tp=2, attention_gpus=24, ffn_gpus=16, micro_batches=3),
    ],
)
def test_layout_names_match_profile_identifiers(layout: Parallelism) -> None:
    assert layout_named(identifier(layout)) == layout
