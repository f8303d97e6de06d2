"""Tests of the bytes of each stage on the network's tiers, against counts by hand."""

from dataclasses import replace

import numpy as np
import pytest

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.fluid import summed
from orchestrrl.lab.sim.net.model import GpuFlows, Servers
from orchestrrl.lab.sim.report_page.charts import stage_s, tier_gbps
from orchestrrl.lab.sim.rl.generation import EnginesOnFabric
from orchestrrl.lab.sim.rl.generation_fleet import Hardware, Leaving, OverFabric, deployed, token_flows
from orchestrrl.lab.sim.rl.run import run_cluster
from orchestrrl.lab.sim.rl.scenario import GenerationSection, scenario_of
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages
from orchestrrl.lab.sim.rl.training import TOKEN_BYTES, response_stream
from orchestrrl.lab.sim.rl.weight_sync import steps_of, sync_stage
from orchestrrl.lab.sim.rl.weight_sync_shards import shards_of, site_of
from orchestrrl.lab.sim.scenario import LognormalLengths, WorkloadSection
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from planner.cost.engines import engine_named
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.profile import Parallelism
from planner.model import ConfigurationId, GpuId, RequestId
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

SERVERS = Servers(8)
WHERE = range(16, 64)
FABRIC = build("fat_tree", SERVERS)
DENSE, MOE = model_named("qwen2.5-14b"), model_named("qwen3-235b-a22b")
LENGTHS = LognormalLengths(kind="lognormal", median_tokens=50, sigma=0.5)
WORKLOAD = WorkloadSection(prompts=4, max_tokens=100, lengths=LENGTHS)
JOB = TrainJob(DENSE, gpu_named("h800"), TrainLayout(tp=4, dp=4), 64, 1000.0)


def vector_bytes(model: str = "qwen2.5-14b") -> float:
    """Return the bytes of a token's activations in 16 bits, over all layers."""
    value = model_named(model)
    return value.layers * value.hidden * 2.0


def sent(parallelism: Parallelism, model: str = "qwen2.5-14b") -> tuple[float, float]:
    """Return the bytes of a token inside servers and between servers."""
    fleet = deployed(parallelism, WHERE, SERVERS)
    flows = token_flows(fleet, model_named(model), SERVERS)
    inside = flows.src // 8 == flows.dst // 8
    assert np.isin(flows.src, WHERE).all()
    return float(flows.bytes[inside].sum()), float(flows.bytes[~inside].sum())


def test_single_gpu_engine_sends_nothing() -> None:
    assert sent(Parallelism(tp=1)) == (0.0, 0.0)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_reduces_twice_per_layer(tp: int) -> None:
    """Each GPU of a ring sends 2 (tp - 1) / tp of the reduced data."""
    assert sent(Parallelism(tp=tp)) == (pytest.approx(2 * tp * 2 * (tp - 1) / tp * vector_bytes()), 0.0)


def test_wide_tensor_parallelism_also_reduces_between_servers() -> None:
    inside, between = sent(Parallelism(tp=16))
    assert inside == pytest.approx(2 * 16 * 2 * 7 / 8 * vector_bytes())
    assert between == pytest.approx(2 * 16 * 2 * (1 / 2) / 8 * vector_bytes())


def test_expert_parallel_engines_send_tokens_to_experts_and_back() -> None:
    inside, between = sent(Parallelism(dp=16, ep=16), "qwen3-235b-a22b")
    whole = 2 * 8 * vector_bytes("qwen3-235b-a22b") * 15 / 16
    assert inside + between == pytest.approx(whole)
    assert between == pytest.approx(whole * 8 / 15)


def test_afd_sends_every_token_to_ffn_gpus_and_back() -> None:
    afd = Parallelism(attention_gpus=16, ffn_gpus=8, micro_batches=3)
    assert sent(afd, "qwen3-235b-a22b") == (0.0, pytest.approx(2 * 8 * vector_bytes("qwen3-235b-a22b")))
    narrow = Parallelism(attention_gpus=32, ffn_gpus=8)
    assert sent(narrow) == (0.0, pytest.approx(2 * vector_bytes()))  # a dense FFN has each token once


def test_tier_bytes_are_proportional_to_tokens() -> None:
    layout, name = Parallelism(dp=16, ep=16), ConfigurationId("tp1dp16ep16")
    hardware = Hardware(MOE, gpu_named("h800"), engine_named("vllm"))
    ready = EnginesOnFabric(GenerationSection(workload=WORKLOAD), hardware, WHERE, FABRIC, [layout])
    one, many = (ready.sent({name: tokens}) for tokens in (1.0, 1000.0))
    assert many == {tier: pytest.approx(1000 * size) for tier, size in one.items()}
    assert one["nic"] == pytest.approx(2 * sent(layout, "qwen3-235b-a22b")[1])  # up and down
    assert summed([one, one]) == {tier: 2 * size for tier, size in one.items()}


def test_moved_kv_is_in_tier_bytes() -> None:
    source, destination = ((Parallelism(tp=2), (GpuId(first), GpuId(first + 1))) for first in (0, 16))
    over, wish = OverFabric(FABRIC, 16, 1e5), Leaving(RequestId("r"), source, destination, 1.0, 1000)
    moved = over([wish])
    assert moved.transferred == {"r"}
    assert moved.tier_bytes["nic"] == pytest.approx(2e8)
    assert over.sent([wish]) == moved.tier_bytes
    again = over([replace(wish, prefill_tokens_per_s=1e12)])  # recomputation is faster: nothing is sent
    assert (again.transferred, again.tier_bytes) == (frozenset(), {})
    assert over.sent([]) == {}


@pytest.mark.parametrize("kind", ["fat_tree", "rfabric"])
@pytest.mark.parametrize("scheme", ["tree", "naive", "two_stage"])
def test_synced_weights_use_nics_at_both_ends(kind: str, scheme: str) -> None:
    fabric = build(kind, SERVERS)
    fleet = deployed(Parallelism(tp=4), WHERE, SERVERS)
    shards, site = shards_of(JOB, fleet, SERVERS.gpus_per_server), site_of(fabric.network(None))
    flows = GpuFlows.joined([step.flows for step in steps_of(scheme, shards, site, SERVERS)])
    sent_bytes = flows.bytes[flows.cross(SERVERS)].sum()
    assert sync_stage(JOB, fleet, fabric, scheme).tier_bytes["nic"] == pytest.approx(2 * sent_bytes, rel=0.01)


def test_answers_are_streamed_to_training_once() -> None:
    stream = response_stream(JOB, WHERE, FABRIC)
    assert stream.bytes == 64 * 1000 * TOKEN_BYTES
    assert stream.tier_bytes["nic"] == pytest.approx(2 * stream.bytes)
    assert 0 < stream.seconds < 0.01
    shared = response_stream(replace(JOB, layout=TrainLayout(tp=4, dp=12)), range(48), FABRIC)
    assert (shared.seconds, shared.tier_bytes) == (0.0, {})


def test_run_has_tier_bytes_of_all_stages() -> None:
    scenario = scenario_of(document(generation__arms=["verl_to", "both"], fabrics=["rfabric"], loop={"steps": 3}))
    for result in run_cluster(scenario):
        run = result.run
        assert set(run.tier_bytes) == {"train", "gen", "weight_sync", "response_stream"}
        assert all(sum(tiers.values()) > 0 for tiers in run.tier_bytes.values())
        rates = tier_gbps(run)
        assert {stage for stage, _ in rates} == set(run.tier_bytes)
        gen_s = stage_s(run, "gen")
        assert gen_s is not None
        assert rates["response_stream", "nic"] == pytest.approx(run.tier_bytes["response_stream"]["nic"] * 8e-9 / gen_s)
        assert any(note.startswith("answers streamed to training per step:") for note in run.notes)


def test_static_engines_process_each_token_once() -> None:
    """Prompts and answers are processed once, without recomputation."""
    scenario = scenario_of(document(generation__layouts=["tp4"]))
    stages = FabricStages(scenario, scenario.fabrics[0])
    last = ArmTimes(stages, "verl_to", 1).healthy[-1]
    passed = last.sample_tokens * last.samples
    one = stages.ready(SimulatedFailures()).sent({ConfigurationId("tp4"): 1.0})
    assert last.tier_bytes == {tier: pytest.approx(size * passed) for tier, size in one.items()}
