"""What the gateway's queue is worth under each routing strategy: whole steps on simulated engines, routed by the
gateway's own fleet, without any moves.

Arms differ in the strategy and in how many requests may wait on an engine; the engines, their requests and what the
gateway knows of them (its own counts, and the KV that the daemon tells once a second) are the same.
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from statistics import mean

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.sim.engines import EngineKind, VirtualEngine
from orchestrrl.lab.sim.gateway import CountedRecord, VirtualGateway
from orchestrrl.lab.sim.workload import SimRequest
from planner.cost.profile import Curve, EngineProfile, ProfileSource, Provenance, StepTime
from planner.model import ConfigurationId, EngineId, NodeId, Parallelism, RequestId

ENGINES = 8
SAMPLES = 8  # of each prompt, dealt to one engine
SEEDS = (1, 2, 3)
# A 14B model at TP=2 on H800s.
TP2 = EngineProfile(
    ConfigurationId("tp2"),
    Parallelism(tp=2),
    StepTime(Curve.line(0.0183738, 8.1e-5), 4.1e-8),
    prefill_tokens_per_s=18_000.0,
    kv_capacity_tokens=582_885,
    max_sequences=1024,
    switch_s=1.7,
    provenance=Provenance(ProfileSource.MEASURED, ""),
)
TICK_S = 0.05  # the gateway receives tokens, and engines requests, so much later
ROUTES_S = 1.0
QUEUE_DEPTH = 4
POLICIES = ("load_index", "round_robin", "prefix_affinity")


@dataclass(frozen=True, slots=True)
class Setting:
    """A step's load. Lengths are lognormal, correlated within a prompt, and cut."""

    name: str
    requests_per_engine: int
    median_tokens: float
    sigma: float
    max_tokens: int
    kv_capacity_tokens: int
    max_sequences: int = TP2.max_sequences
    correlation: float = 0.6

    def requests(self, seed: int) -> list[SimRequest]:
        rng = random.Random(seed)
        made = []
        for prompt in range(ENGINES * self.requests_per_engine // SAMPLES):
            of_prompt, prompt_tokens = rng.gauss(0, 1), rng.randint(64, 512)
            for sample in range(SAMPLES):
                score = self.correlation**0.5 * of_prompt + (1 - self.correlation) ** 0.5 * rng.gauss(0, 1)
                length = min(self.max_tokens, max(1, round(self.median_tokens * exp(self.sigma * score))))
                made.append(SimRequest(RequestId(f"p{prompt:03d}-s{sample}"), f"p{prompt:03d}", prompt_tokens, length))
        return made

    @property
    def kind(self) -> EngineKind:
        profile = replace(TP2, kv_capacity_tokens=self.kv_capacity_tokens, max_sequences=self.max_sequences)
        return EngineKind(profile)


@dataclass(frozen=True, slots=True)
class ArrivalLoad:
    """How a step's requests arrive."""

    name: str
    setting: Setting
    rate_per_s: float | None = None  # None: all at once
    slowdown: float = 1.0  # of every second engine's steps, which the gateway is not told


# Four times as many requests as seats, lengths lognormal; or about as many in a second as the engines can end.
_SEATED = Setting("16 seats", 64, 400.0, 1.2, 4000, 582_885, max_sequences=16)
LOADS = (
    ArrivalLoad("at once", _SEATED),
    ArrivalLoad("10/s", _SEATED, 10.0),
    ArrivalLoad("at once, half of them half as fast", _SEATED, slowdown=2.0),
)


@dataclass(frozen=True, slots=True)
class RoutingOutcome:
    makespan_s: float
    latency_s: float  # mean, from arrival to the last token


async def outcome(load: ArrivalLoad, seed: int, policy: str, depth: int) -> RoutingOutcome:
    """Run one step of `load`, a prompt's samples arriving together."""
    clock, requests = VirtualClock(), load.setting.requests(seed)
    finished: list[CountedRecord] = []
    kind = load.setting.kind
    engines = {f"http://e{n}": VirtualEngine(EngineId(f"e{n}"), kind, (), f"http://e{n}", 0.0) for n in range(ENGINES)}
    for engine in list(engines.values())[1::2]:
        engine.scheduler.slowdown = load.slowdown

    def arrive(record: CountedRecord, engine: VirtualEngine, _: VirtualEngine | None) -> None:
        engine.scheduler.submit(engine.scheduler.now_s, record.id, record.context_tokens, record.left_tokens)

    routing, at = RoutingPolicy(policy), engines.__getitem__
    gateway = VirtualGateway(NodeId("gateway"), clock, at, arrive, finished.append, routing=routing, queue_depth=depth)
    rate, routed_s = load.rate_per_s, -ROUTES_S
    coming = deque((index // SAMPLES * SAMPLES / rate if rate else 0.0, r) for index, r in enumerate(requests))
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
    """Mean seconds from a request's arrival to its end, with a queue in the gateway and without."""
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
