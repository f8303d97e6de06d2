"""Traffic volumes of a deployment, against manual calculations; a redeployment changes the demand."""

from collections import Counter

import pytest
from fabric_sites import gpus_of, small_site

from planner.cost.models import MODELS
from planner.fabric.demand import GENERAL, flows_of
from planner.fabric.deployment_intent import DeployedEngine, deployment_intent
from planner.fabric.generate import SiteShape, regular_site
from planner.fabric.intent import Primitive, Stage, TrafficOperation
from planner.fabric.materialize import materialize
from planner.fabric.plan import FabricFailures, FabricPlan, FabricState
from planner.fabric.topology import RESPONSES, PodRole
from planner.model import EngineId, GpuId, Parallelism

DENSE = MODELS["qwen2.5-14b"]
EXPERTS = MODELS["qwen3-235b-a22b"]
TOKENS = 1e6
NOTHING = FabricFailures()


def engine(layout: Parallelism, first: int = 0, name: str = "e0", responses: float = 0.0) -> DeployedEngine:
    gpus = tuple(map(GpuId, range(first, first + layout.gpus)))
    return DeployedEngine(EngineId(name), gpus, layout, TOKENS, responses)


def test_tp_reduces_twice_per_layer() -> None:
    (found,) = deployment_intent(DENSE, [engine(Parallelism(tp=4))]).traffic
    assert (found.operation, found.primitive, found.groups) == (
        TrafficOperation.TP,
        Primitive.RING_ALL_REDUCE,
        ((0, 1, 2, 3),),
    )
    assert found.bytes_per_rank * found.times == TOKENS * 5120 * 2 * 2 * 48


def test_single_gpu_has_no_traffic() -> None:
    assert deployment_intent(DENSE, [engine(Parallelism())]).traffic == ()


def test_tp_beyond_a_node_uses_every_rail() -> None:
    site = regular_site(SiteShape(1, 1, servers_per_pod=2, servers_per_tor=1))
    gen = gpus_of(site, PodRole.GEN)
    layout = Parallelism(tp=16)
    found = deployment_intent(DENSE, [DeployedEngine(EngineId("wide"), tuple(map(GpuId, gen)), layout, TOKENS)])
    flows = flows_of(found, site, NOTHING)
    buffer_bytes = TOKENS * 5120 * 2 * 2 * 48
    assert len(flows.tors[GENERAL]) == 16  # eight rails, both directions
    assert sum(flows.tors[GENERAL].values()) == pytest.approx(2 * buffer_bytes)  # 2 * (2 - 1) of the sums of two nodes
    assert len(set(flows.tors[GENERAL].values())) == 1


def test_expert_traffic_connects_all_replicas() -> None:
    both = deployment_intent(EXPERTS, [engine(Parallelism(tp=2, dp=4, ep=8))]).traffic
    found = {each.operation: each for each in both}
    exchange = found[TrafficOperation.EP]
    assert exchange.groups == (tuple(range(8)),)
    assert exchange.bytes_per_rank * exchange.times * 8 == pytest.approx(TOKENS * 8 * 4096 * 2 * 2 * 94)
    summed = found[TrafficOperation.TP]
    assert summed.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert summed.bytes_per_rank * summed.times == pytest.approx(TOKENS / 4 * 4096 * 2 * 94)


def test_experts_inside_one_tp_group_use_all_reduce() -> None:
    (found,) = deployment_intent(EXPERTS, [engine(Parallelism(tp=8, ep=8))]).traffic
    assert (found.operation, found.times) == (TrafficOperation.TP, 2 * 94)


def test_pipeline_stages_forward_once() -> None:
    found = {each.operation: each for each in deployment_intent(DENSE, [engine(Parallelism(tp=2, pp=2))]).traffic}
    assert found[TrafficOperation.PP].groups == ((0, 2), (1, 3))
    assert found[TrafficOperation.PP].bytes_per_rank == TOKENS * 5120 * 2 / 2
    assert found[TrafficOperation.TP].groups == ((0, 1), (2, 3))
    assert found[TrafficOperation.TP].times == 48


def test_attention_and_ffn_exchange_in_both_directions() -> None:
    layout = Parallelism(attention_gpus=16, ffn_gpus=8)
    (found,) = deployment_intent(EXPERTS, [engine(layout)]).traffic
    assert (found.operation, found.primitive, found.both_ways) == (TrafficOperation.AFD, Primitive.BIPARTITE, True)
    assert (found.groups, found.receivers) == ((tuple(range(16)),), (tuple(range(16, 24)),))
    assert found.bytes_per_rank * found.times * 16 == pytest.approx(TOKENS * 8 * 4096 * 2 * 94)


def test_dense_afd_ffn_has_all_reduce() -> None:
    layout = Parallelism(tp=2, attention_gpus=4, ffn_gpus=2)
    found = deployment_intent(DENSE, [engine(layout)]).traffic
    assert [(each.operation, each.groups) for each in found] == [
        (TrafficOperation.AFD, ((0, 1, 2, 3),)),
        (TrafficOperation.TP, ((0, 1), (2, 3))),
        (TrafficOperation.TP, ((4, 5),)),
    ]


def test_responses_go_to_trainers_round_robin_over_slice() -> None:
    site = small_site()
    gen, train = gpus_of(site, PodRole.GEN), gpus_of(site, PodRole.TRAIN)
    engines = [engine(Parallelism(tp=4), gen[0] + 4 * number, f"e{number}", 1000.0) for number in range(8)]
    intent = deployment_intent(DENSE, engines, trainers=tuple(map(GpuId, train[:2])))
    streams = [each for each in intent.traffic if each.operation is TrafficOperation.RESPONSES]
    assert Counter(group[1] for each in streams for group in each.groups) == {train[0]: 4, train[1]: 4}
    between_pods: Counter[tuple[str, str]] = Counter()
    for (one, other), sent_bytes in flows_of(intent, site, NOTHING).tors[RESPONSES].items():
        between_pods[site.pod_of[one], site.pod_of[other]] += sent_bytes  # type: ignore[assignment]
    assert between_pods == pytest.approx({("gen0", "train0"): 4 * 8000.0, ("gen1", "train0"): 4 * 8000.0})
    plan = materialize(site, intent, FabricState())
    assert isinstance(plan, FabricPlan)
    assert not [note for note in plan.notes if "bytes" in note]


def test_equal_engines_share_an_entry() -> None:
    engines = [engine(Parallelism(tp=2), 2 * number, f"e{number}") for number in range(4)]
    (found,) = deployment_intent(DENSE, engines).traffic
    assert found.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_redeployment_changes_demand_and_circuits() -> None:
    site = regular_site(SiteShape(1, 1, servers_per_pod=4, servers_per_tor=1))
    gen = gpus_of(site, PodRole.GEN)
    narrow = [engine(Parallelism(tp=8), gen[0] + 8 * number, f"e{number}") for number in range(4)]
    wide = [engine(Parallelism(tp=1, dp=32, ep=32), gen[0])]
    split = [engine(Parallelism(attention_gpus=24, ffn_gpus=8), gen[0])]
    state, seen = FabricState(), []
    for engines in (narrow, wide, split):
        intent = deployment_intent(EXPERTS, engines)
        assert intent.stage is Stage.GEN
        plan = materialize(site, intent, state)
        assert isinstance(plan, FabricPlan)
        state = FabricState(plan.cross_connects)
        seen.append((flows_of(intent, site, NOTHING).tors[GENERAL], plan.cross_connects))
    assert seen[0][0] == {}
    assert len({str(demand) for demand, _ in seen}) == 3
    assert len({circuits for _, circuits in seen}) == 3


def test_engine_must_have_gpus_of_its_layout() -> None:
    with pytest.raises(ValueError, match="e0: must have 4 GPUs, got 1"):
        DeployedEngine(EngineId("e0"), (GpuId(0),), Parallelism(tp=4), TOKENS)
