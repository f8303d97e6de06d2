"""Measure how much the gateway's queue reduces the latency of requests under each routing policy. Simulated engines run
the requests of whole steps. The gateway's routing code routes the requests, and no request is moved.

The compared runs differ only in the policy and in the number of requests that may wait on an engine. The engines, the
requests and the inputs of the gateway are the same. These inputs are the gateway's own counts, and the KV usage that
the daemon reports once a second.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.sim.engines import EngineKind, VirtualEngine
from orchestrrl.lab.sim.gateway import CountedRecord, VirtualGateway
from orchestrrl.lab.sim.scenario import LognormalLengths, WorkloadSection
from orchestrrl.lab.sim.workload import requests_of_step
from planner.cost.paper import named_profile
from planner.model import EngineId, NodeId

ENGINES = 8
SEATS = 16  # maximum sequences per engine
SEEDS = (1, 2, 3)
TICK_S = 0.05  # delay of tokens to the gateway and of requests to engines
ROUTES_S = 1.0
QUEUE_DEPTH = 4
POLICIES = ("load_index", "round_robin", "prefix_affinity")
# Four times as many requests as the engines can run at once.
STEP = WorkloadSection(
    prompts=64,
    prompt_tokens=(64, 512),
    max_tokens=4000,
    lengths=LognormalLengths(kind="lognormal", median_tokens=400.0, sigma=1.2),
    correlation=0.6,
)


@dataclass(frozen=True, slots=True)
class ArrivalLoad:
    """The requests of one step with their arrival rate, and the capacity and speed of the engines."""

    name: str
    rate_per_s: float | None = None  # None: all at once
    slowdown: float = 1.0  # of every second engine; not reported to the gateway
    step: WorkloadSection = STEP
    seats: int = SEATS

    @property
    def kind(self) -> EngineKind:
        """The kind of the engines: a 14B model at TP=2 on H800s, with at most `seats` running sequences."""
        profile = next(each for each in named_profile("paper-14b-h800").configurations if each.id == "tp2")
        return EngineKind(replace(profile, max_sequences=self.seats))


# All at once, or at about the rate that the engines can complete.
LOADS = (
    ArrivalLoad("at once"),
    ArrivalLoad("13/s", 13.0),
    ArrivalLoad("at once, half of them half as fast", slowdown=2.0),
)


@dataclass(frozen=True, slots=True)
class RoutingOutcome:
    makespan_s: float
    latency_s: float  # mean time from arrival to the last token


async def outcome(load: ArrivalLoad, seed: int, policy: str, depth: int) -> RoutingOutcome:
    """Run one step of `load` and return the step's outcome. The samples of a prompt arrive together. `depth` is the
    queue depth: the number of requests that may wait on an engine before the gateway queues further requests. If it is
    0, the gateway has no queue."""
    clock, requests = VirtualClock(), requests_of_step(load.step, seed, 0)
    finished: list[CountedRecord] = []
    kind = load.kind
    engines = {f"http://e{n}": VirtualEngine(EngineId(f"e{n}"), kind, (), f"http://e{n}", 0.0) for n in range(ENGINES)}
    for engine in list(engines.values())[1::2]:
        engine.scheduler.slowdown = load.slowdown

    def arrive(record: CountedRecord, engine: VirtualEngine, _: VirtualEngine | None) -> None:
        engine.scheduler.submit(engine.scheduler.now_s, record.id, record.context_tokens, record.left_tokens)

    routing, at = RoutingPolicy(policy, queue_depth=depth), engines.__getitem__
    gateway = VirtualGateway(NodeId("gateway"), clock, at, arrive, finished.append, routing)
    rate, routed_s = load.rate_per_s, -ROUTES_S
    samples = load.step.samples
    coming = deque((each.group_index * samples / rate if rate else 0.0, each) for each in requests)
    while len(finished) < len(requests):
        if clock.now_s() - routed_s >= ROUTES_S:
            routed_s = clock.now_s()
            gateway.fleet.set_routes([_route(engine) for engine in engines.values()])
        while coming and coming[0][0] <= clock.now_s():
            gateway.submit([coming.popleft()[1]])
        await clock.advance(TICK_S)
        for engine in engines.values():
            gateway.progressed(engine, engine.advance(clock.now_s()), clock.now_s())
    ended_s = [record.finished_s or 0.0 for record in finished]
    latencies_s = [at_s - record.arrived_s for at_s, record in zip(ended_s, finished, strict=True)]
    return RoutingOutcome(max(ended_s), mean(latencies_s))


def _route(engine: VirtualEngine) -> EngineRoute:
    shape, used_tokens = engine.scheduler.shape, engine.scheduler.kv_used_tokens
    return EngineRoute(
        engine.id,
        engine.url,
        kv_capacity_tokens=shape.kv_capacity_tokens,
        kv_free_tokens=max(0, shape.kv_capacity_tokens - used_tokens),
        max_sequences=shape.max_num_seqs,
    )


def routing(loads: Sequence[ArrivalLoad] = LOADS, seeds: Sequence[int] = SEEDS) -> list[Figure]:
    """Measure the mean time from a request's arrival to its end, with and without a queue in the gateway."""
    figures = []
    for load in loads:
        for policy in POLICIES:
            without, within = (
                [asyncio.run(outcome(load, seed, policy, depth)) for seed in seeds] for depth in (0, QUEUE_DEPTH)
            )
            ends_s = [mean(run.makespan_s for run in runs) for runs in (without, within)]
            latencies_s = [mean(run.latency_s for run in runs) for runs in (without, within)]
            note = f"depth {QUEUE_DEPTH}; makespan {ends_s[1]:.1f} s, without {ends_s[0]:.1f} s"
            name = f"queue ({policy}, {load.name})"
            figures.append(Figure(name, latencies_s[1], "s", "no queue", latencies_s[0], note))
    return figures
