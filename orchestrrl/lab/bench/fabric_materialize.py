"""What it takes to turn an intent into circuits at scale."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrrl.lab.bench.figure import Figure
from planner.cost.models import MODELS
from planner.fabric.deployment_intent import DeployedEngine, deployment_intent
from planner.fabric.generate import regular_site
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.materialize import materialize
from planner.fabric.plan import FabricPlan, FabricState
from planner.fabric.shape import SiteShape
from planner.fabric.topology import PodRole, Site
from planner.model import EngineId, GpuId, Hold, Parallelism

GIB = 2.0**30
MODEL = MODELS["qwen3-235b-a22b"]
EXPERT_GROUP = 256  # GPUs of an all-to-all in training: over four blocks of ToRs
TOKENS = 1e6  # of an engine in a period
HOLDERS = 64  # trainer ranks that hold a shard each
REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class SiteScale:
    """PoDs of 64 servers with eight GPUs, eight servers below a ToR."""

    gpus: int
    train_pods: int
    gen_pods: int
    aim_s: float

    def site(self) -> Site:
        return regular_site(SiteShape(self.train_pods, self.gen_pods, servers_per_pod=64, servers_per_tor=8))


SCALES = (SiteScale(2048, 2, 2, 1.0), SiteScale(16384, 8, 24, 3.0))


def fabric_materialize() -> list[Figure]:
    figures = []
    for scale in SCALES:
        site = scale.site()
        spent_s, plans = _spent(site)
        each = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in spent_s.items())
        note = f"CPU: {each}; {len(plans[Stage.WEIGHT_SYNC].cross_connects)} cross-connects"
        name, slowest_s = f"fabric_materialize_{scale.gpus}_gpus", max(spent_s.values())
        figures.append(Figure(name, slowest_s, "s", "aim", scale.aim_s, note))
    return figures


def _spent(site: Site) -> tuple[Mapping[Stage, float], Mapping[Stage, FabricPlan]]:
    """Median CPU seconds of each stage, on what the one before left."""
    spent_s: dict[Stage, float] = {}
    plans: dict[Stage, FabricPlan] = {}
    state = FabricState()
    for intent in (training(site), generation(site), weights(site)):
        times_s = []
        for _ in range(REPETITIONS):
            started_s = time.process_time()
            plan = _planned(site, intent, state)
            times_s.append(time.process_time() - started_s)
        spent_s[intent.stage], plans[intent.stage] = sorted(times_s)[REPETITIONS // 2], plan
        state = FabricState(plan.cross_connects)
    return spent_s, plans


def training(site: Site) -> Intent:
    """Experts in a PoD, and gradients over all of them."""
    ranks = _gpus(site, PodRole.TRAIN)
    groups = tuple(ranks[first : first + EXPERT_GROUP] for first in range(0, len(ranks), EXPERT_GROUP))
    replicas = tuple(zip(*groups, strict=True))
    return Intent(
        "backward",
        Stage.TRAIN,
        (
            Traffic(TrafficOperation.EP, Primitive.ALL_TO_ALL, groups, GIB),
            Traffic(TrafficOperation.DP, Primitive.RING_ALL_REDUCE, replicas, GIB / 4),
        ),
    )


def generation(site: Site) -> Intent:
    """Engines with experts over 16 servers, responses streamed to training."""
    gpus, size = _gpus(site, PodRole.GEN), 128
    engines = [
        DeployedEngine(
            EngineId(f"engine{first:06}"),
            tuple(map(GpuId, gpus[first : first + size])),
            Parallelism(tp=1, dp=size, ep=size),
            TOKENS,
            TOKENS,
        )
        for first in range(0, len(gpus), size)
    ]
    return deployment_intent(MODEL, engines, trainers=tuple(map(GpuId, _gpus(site, PodRole.TRAIN)[::512])))


def weights(site: Site) -> Intent:
    holders, receivers = _gpus(site, PodRole.TRAIN)[:HOLDERS], _gpus(site, PodRole.GEN)
    shards = tuple((rank,) for rank in holders)
    takers = tuple(receivers[number::HOLDERS] for number in range(HOLDERS))
    each = Traffic(
        TrafficOperation.WEIGHT_SYNC, Primitive.BROADCAST, shards, 2 * MODEL.params / HOLDERS, receivers=takers
    )
    return Intent("weights", Stage.WEIGHT_SYNC, (each,))


def _planned(site: Site, intent: Intent, state: FabricState) -> FabricPlan:
    plan = materialize(site, intent, state)
    if isinstance(plan, Hold):
        raise RuntimeError(f"{intent.period}: {plan.code}, {plan.detail}")
    return plan


def _gpus(site: Site, role: PodRole) -> tuple[int, ...]:
    return tuple(gpu for server in site.servers if site.pod[server.pod].role is role for gpu in server.gpus)
