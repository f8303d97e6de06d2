"""Tests of generation steps on fabrics: completeness, phases, and monotonicity in the fabric's speed."""

import pytest

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.rl.generation import (
    EnginesOnFabric,
    generation_stages,
    redeployed_stage,
)
from orchestrrl.lab.sim.rl.generation_fleet import Hardware
from orchestrrl.lab.sim.rl.model import GenStage
from orchestrrl.lab.sim.rl.scenario import GenerationSection
from orchestrrl.lab.sim.scenario import LognormalLengths, WorkloadSection
from orchestrrl.lab.sim.workload import requests_of_step
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.paper import paper_engine
from planner.cost.profile import Parallelism

SERVERS = Servers(8)
WORKLOAD = WorkloadSection(
    prompts=32,
    samples=4,
    prompt_tokens=(16, 64),
    max_tokens=3000,
    lengths=LognormalLengths(kind="lognormal", median_tokens=400, sigma=1.0),
    correlation=0.5,
)
DENSE, MOE = model_named("qwen2.5-14b"), model_named("qwen2-57b-a14b")
AFD = Parallelism(attention_gpus=8, ffn_gpus=8, micro_batches=2)
HARDWARE = Hardware(DENSE, gpu_named("h800"), paper_engine(DENSE))
DAEMON = {"slow": {"interval_s": 5.0, "epsilon_s": 0.5, "cooldown_s": 5.0, "work_budget": 100}}


def generation(gpus: int = 16) -> EnginesOnFabric:
    section, layouts = GenerationSection(workload=WORKLOAD, initial="tp2"), (Parallelism(tp=2), Parallelism(tp=8))
    return EnginesOnFabric(section, HARDWARE, range(32, 32 + gpus), fabric(), layouts, DAEMON)


def fabric(kind: str = "fat_tree", servers: Servers = SERVERS, **options: object) -> SimulatedFabric:
    return build(kind, servers, servers_per_pod=4, **options)


def generation_stage(arm: str, seed: int = 1, gpus: int = 16) -> GenStage:
    return generation_stages(generation(gpus), arm, seed, 1)[0]


def check(stage: GenStage, samples: int) -> None:
    assert stage.samples == len(stage.finish_s) == samples
    assert list(stage.finish_s) == sorted(stage.finish_s)
    assert stage.seconds == pytest.approx(stage.finish_s[-1])
    assert sum(stage.phases_s.values()) == pytest.approx(stage.seconds)
    assert stage.remaining[0] == (0.0, samples)
    assert stage.remaining[-1][1] == 0


@pytest.mark.parametrize("arm", ["verl_to", "verl_lo", "packed_known", "both", "balancing"])
def test_every_request_is_answered(arm: str) -> None:
    for step, stage in enumerate(generation_stages(generation(), arm, 1, 2)):
        check(stage, 128)
        lengths = [each.prompt_tokens + each.output_tokens for each in requests_of_step(WORKLOAD, 1, step)]
        assert stage.sample_tokens == pytest.approx(sum(lengths) / 128)


def test_partial_rollout_carries_unfinished_requests_over() -> None:
    first, second = generation_stages(generation(), "partial_rollout", 1, 2)
    assert first.samples >= 0.9 * 128
    assert first.remaining[-1][1] == 128 - first.samples
    assert second.samples + first.samples <= 256


def test_changed_engines_transfer_kv() -> None:
    stage = generation_stage("both", gpus=32)
    check(stage, 128)
    if "redeploying" in stage.phases_s:
        assert stage.phases_s["redeploying"] > 0
        assert stage.phases_s["moving KV"] > 0


def test_stage_is_deterministic() -> None:
    assert generation_stage("both", 3) == generation_stage("both", 3)


def test_unknown_arm_is_rejected() -> None:
    with pytest.raises(ValueError, match="arm must be a static arm"):
        generation_stage("wishful")


def test_redeployed_stage_is_never_slower_on_a_faster_fabric() -> None:
    """Engines change from AFD, whose exchanges and KV cross servers, to TP, whose exchanges do not."""
    hardware, requests = Hardware(MOE, gpu_named("h800"), paper_engine(MOE)), requests_of_step(WORKLOAD, 1, 0)
    fast, slow = (
        redeployed_stage(hardware, range(32, 64), (AFD, Parallelism(tp=4)), requests, 0.5, each)
        for each in (fabric(), fabric("oversubscribed", ratio=4.0, radix=10))
    )
    for stage in (fast, slow):
        check(stage, 128)
        assert list(stage.phases_s) == ["afd8+8x2", "redeploying", "moving KV", "tp4"]
        assert stage.phases_s["moving KV"] > 0
    assert fast.phases_s["afd8+8x2"] <= slow.phases_s["afd8+8x2"]
    assert fast.phases_s["moving KV"] < slow.phases_s["moving KV"]
    assert fast.phases_s["redeploying"] == slow.phases_s["redeploying"]
