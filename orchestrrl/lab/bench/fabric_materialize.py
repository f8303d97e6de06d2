"""What it takes to turn an intent into circuits at scale, what the circuits are worth against a mesh that knows no
demand, and what each thing that fails costs a period."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orchestrrl.lab.bench.figure import Figure
from planner.cost.models import MODELS
from planner.fabric.allocate import BITS_PER_BYTE
from planner.fabric.demand import GENERAL, flows_of
from planner.fabric.deployment_intent import DeployedEngine, deployment_intent
from planner.fabric.failure_cost import cost_of
from planner.fabric.generate import regular_site
from planner.fabric.intent import Intent, Primitive, Stage, Traffic, TrafficOperation
from planner.fabric.materialize import materialize
from planner.fabric.model import EndpointId, Pair, PortPair, pair_of
from planner.fabric.plan import Directed, FabricFailures, FabricPlan, FabricState
from planner.fabric.shape import SiteShape
from planner.fabric.sizing import spread
from planner.fabric.topology import PodRole, Site, Tier
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
        figures.append(
            Figure(
                name=f"fabric_materialize_{scale.gpus}_gpus",
                value=max(spent_s.values()),
                unit="s",
                baseline="aim",
                baseline_value=scale.aim_s,
                note="CPU: "
                + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in spent_s.items())
                + f"; {len(plans[Stage.WEIGHT_SYNC].cross_connects)} cross-connects",
            )
        )
        if scale is SCALES[0]:
            figures += [_against_mesh(site, plans[Stage.TRAIN]), *_failures(site)]
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


def _against_mesh(site: Site, plan: FabricPlan) -> Figure:
    """In the PoD that takes longest, against circuits dealt out evenly over its ToRs, as many as it has."""
    tier = max((each for each in plan.tiers if each.pod is not None), key=lambda each: each.completion_s)
    assert tier.pod is not None
    tors = {tor.id for tor in site.tors_of[tier.pod]}
    between = {pair: count for pair, count in tier.circuits.items() if tors.issuperset(pair)}
    ports: dict[EndpointId, int] = {}
    for pair, count in between.items():
        for end in pair:
            ports[end] = ports.get(end, 0) + count
    mesh = spread(site.link_gbps, ports, {})
    demand = flows_of(training(site), site, FabricFailures()).tors[GENERAL]
    wanted = {ends: sent_bytes for ends, sent_bytes in demand.items() if tors.issuperset(ends)}
    ours, theirs = (_served(site, wanted, circuits) for circuits in (between, mesh))
    return Figure(
        name="fabric_exchange_of_experts",
        value=ours[0],
        unit="of bytes",
        baseline="even mesh",
        baseline_value=theirs[0],
        note=f"between ToRs of {tier.pod} that share no circuit; the others take {ours[1]:.3f} s, {theirs[1]:.3f} s in"
        f" the mesh, over {sum(between.values())} circuits",
    )


def _served(site: Site, demand: Directed, circuits: Mapping[Pair, int]) -> tuple[float, float]:
    """The share of bytes that has no circuit of its own, and the seconds of the slowest pair that has."""
    dark_bytes, slowest = 0.0, 0.0
    for ends, sent_bytes in demand.items():
        count = circuits.get(pair_of(*ends), 0)
        dark_bytes += 0.0 if count else sent_bytes
        slowest = max(slowest, sent_bytes / count) if count else slowest
    return dark_bytes / (sum(demand.values()) or 1.0), slowest * BITS_PER_BYTE / (site.link_gbps * 1e9)


def _failures(site: Site) -> Iterator[Figure]:
    server = site.servers[0]
    agg = site.agg_switches_of[server.pod][0]
    core = next(each for each in site.switches if each.tier is Tier.CORE)
    uplink = next(end for end in agg.ports if end not in site.tor)
    port, other = agg.ports[server.tors[0]][0], agg.ports[server.tors[1]][0]
    things = {
        "tor_port": FabricFailures(ports=frozenset({(agg.id, port)})),
        "cross_connect": FabricFailures(
            cross_connects=frozenset({PortPair(agg.id, min(port, other), max(port, other))})
        ),
        "lane": FabricFailures(ports=frozenset({(agg.id, agg.ports[uplink][0])})),
        "agg_switch": FabricFailures(switches=frozenset({agg.id})),
        "core_switch": FabricFailures(switches=frozenset({core.id})),
        "nic": FabricFailures(nics=frozenset({(server.id, 0)})),
        "server": FabricFailures(servers=frozenset({server.id})),
    }
    for name, broken in things.items():
        cost = cost_of(site, training(site), broken)
        if isinstance(cost, Hold):
            raise RuntimeError(f"no plan without {name}: {cost.detail}")
        yield Figure(
            name=f"fabric_failed_{name}",
            value=cost.slowdown,
            unit="periods",
            baseline="nothing failed",
            baseline_value=1.0,
            note=f"{cost.lost_gbps:.0f} of {cost.healthy_gbps:.0f} Gbps of circuits lost, {len(cost.unserved)} pairs"
            f" without, slowest pair {cost.completion_s / cost.healthy_completion_s:.3f} times as long",
        )


def _planned(site: Site, intent: Intent, state: FabricState) -> FabricPlan:
    plan = materialize(site, intent, state)
    if isinstance(plan, Hold):
        raise RuntimeError(f"{intent.period}: {plan.code}, {plan.detail}")
    return plan


def _gpus(site: Site, role: PodRole) -> tuple[int, ...]:
    return tuple(gpu for server in site.servers if site.pod[server.pod].role is role for gpu in server.gpus)
