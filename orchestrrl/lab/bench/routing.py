"""What the gateway's queue is worth under each routing strategy: whole steps on simulated engines, routed by the
gateway's own fleet, without any moves.

Arms differ in the strategy and in how many requests may wait on an engine; the engines, their requests and what the
gateway knows of them (its own counts, and the KV that the daemon tells once a second) are the same.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp
from statistics import mean
from typing import cast

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import Engine
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends, NoBackend
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.sim.gateway import CountedRecord, record_of
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler
from planner.model import Configuration, ConfigurationId, EngineId, RequestId

ENGINES = 8
SAMPLES = 8  # of each prompt, dealt to one engine
SEEDS = (1, 2, 3)
# A 14B model at TP=2 on H800s.
TP2 = Configuration(ConfigurationId("tp2"), 2, 0.0183738, 8.1e-5, 4.1e-8, 582_885, 1024, 18_000.0, 1.7)
TICK_S = 0.05  # the gateway hears of tokens, and engines of requests, so much later
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
    def configuration(self) -> Configuration:
        return replace(TP2, kv_capacity_tokens=self.kv_capacity_tokens)


def shape_of(configuration: Configuration) -> EngineShape:
    return EngineShape(
        configuration.alpha_s,
        configuration.beta_s,
        configuration.gamma_s,
        configuration.max_sequences,
        configuration.kv_capacity_tokens,
        1 / configuration.prefill_tokens_per_s,
    )


@dataclass(frozen=True, slots=True)
class ArrivalLoad:
    """What arrives, at engines of so many seats."""

    name: str
    setting: Setting
    max_sequences: int
    rate_per_s: float | None = None  # None: all at once
    slowdown: float = 1.0  # of every second engine's steps, which the gateway is not told

    @property
    def shape(self) -> EngineShape:
        return replace(shape_of(self.setting.configuration), max_num_seqs=self.max_sequences)


# Four times as many requests as seats, lengths lognormal; or about as many in a second as the engines can end.
_SEATED = Setting("16 seats", 64, 400.0, 1.2, 4000, 582_885)
LOADS = (
    ArrivalLoad("at once", _SEATED, 16),
    ArrivalLoad("10/s", _SEATED, 16, 10.0),
    ArrivalLoad("at once, half of them half as fast", _SEATED, 16, slowdown=2.0),
)


@dataclass(frozen=True, slots=True)
class RoutingArm:
    policy: str = "load_index"
    depth: int = 0


@dataclass(frozen=True, slots=True)
class RoutingOutcome:
    makespan_s: float
    latency_s: float  # mean, from arrival to the last token


@dataclass(slots=True)
class _Step:
    """A fleet of equal engines, and a gateway's view of it."""

    load: ArrivalLoad
    arm: RoutingArm
    clock: VirtualClock = field(default_factory=VirtualClock)
    engines: dict[EngineId, Scheduler] = field(default_factory=dict)
    records: dict[RequestId, CountedRecord] = field(default_factory=dict)

    def run(self, arrivals: Sequence[tuple[float, SimRequest]]) -> RoutingOutcome:
        """`arrivals` in order of their time, seconds."""
        slowdowns = [self.load.slowdown if index % 2 else 1.0 for index in range(ENGINES)]
        self.engines = {
            EngineId(f"e{index:02d}"): Scheduler(self.load.shape, slowdown=slowdown)
            for index, slowdown in enumerate(slowdowns)
        }
        fleet = EngineBackends(
            lambda url: cast(Engine, _Address(url)),
            clock=self.clock,
            routing=RoutingPolicy(self.arm.policy),
            queue_depth=self.arm.depth,
        )
        coming, now_s, told_s = deque(arrivals), 0.0, -ROUTES_S
        arrived_s = {request.id: at_s for at_s, request in arrivals}
        finished_s: dict[RequestId, float] = {}
        while len(finished_s) < len(arrivals):
            if now_s - told_s >= ROUTES_S:
                told_s = now_s
                fleet.set_routes([self._route(engine) for engine in self.engines])
            while coming and coming[0][0] <= now_s:
                self._arrive(fleet, coming.popleft()[1], now_s)
            now_s += TICK_S
            for engine, scheduler in self.engines.items():
                self._advance(fleet, engine, scheduler, now_s, finished_s)
        return RoutingOutcome(max(finished_s.values()), mean(at_s - arrived_s[id] for id, at_s in finished_s.items()))

    def _route(self, engine: EngineId) -> EngineRoute:
        shape, used = self.load.shape, self.engines[engine].kv_used_tokens
        capacity = shape.kv_capacity_tokens
        return EngineRoute(
            engine,
            f"http://{engine}",
            kv_capacity_tokens=capacity,
            kv_free_tokens=max(0, capacity - used),
            max_sequences=shape.max_num_seqs,
        )

    def _arrive(self, fleet: EngineBackends, request: SimRequest, now_s: float) -> None:
        record = record_of(request, now_s)
        self.records[record.id] = record
        fleet.enqueue(record, partial(self._placed, record))

    def _placed(self, record: CountedRecord, backend: EngineBackend | NoBackend) -> None:
        assert isinstance(backend, EngineBackend)
        backend.enter(record, record.arrived_s)
        scheduler = self.engines[backend.id]
        scheduler.submit(scheduler.now_s, record.id, record.context_tokens, record.left_tokens)

    def _advance(
        self,
        fleet: EngineBackends,
        engine: EngineId,
        scheduler: Scheduler,
        now_s: float,
        finished_s: dict[RequestId, float],
    ) -> None:
        backend = fleet.get(engine)
        assert backend is not None
        for progress in scheduler.advance(now_s):
            record = self.records[progress.id]
            before, was = record.context_tokens, record.state
            record.grow(progress.tokens, now_s)
            backend.advance(record, before, was, now_s)
            if progress.finished_s is not None:
                finished_s[record.id] = progress.finished_s
                fleet.release(backend, record)
        fleet.dispatch()


@dataclass(frozen=True, slots=True)
class _Address:
    url: str


def outcome(load: ArrivalLoad, seed: int, arm: RoutingArm) -> RoutingOutcome:
    """One step of `load`, a prompt's samples arriving together."""
    requests = load.setting.requests(seed)
    rate = load.rate_per_s
    arrivals = [(index // SAMPLES * SAMPLES / rate if rate else 0.0, r) for index, r in enumerate(requests)]
    return _Step(load, arm).run(arrivals)


def routing(loads: Sequence[ArrivalLoad] = LOADS, seeds: Sequence[int] = SEEDS) -> list[Figure]:
    """Mean seconds from a request's arrival to its end, with a queue in the gateway and without."""
    figures = []
    for load in loads:
        for policy in POLICIES:
            without, within = (
                [outcome(load, seed, RoutingArm(policy, depth)) for seed in seeds] for depth in (0, QUEUE_DEPTH)
            )
            ends_s = [mean(run.makespan_s for run in runs) for runs in (without, within)]
            latencies_s = [mean(run.latency_s for run in runs) for runs in (without, within)]
            note = f"depth {QUEUE_DEPTH}; makespan {ends_s[1]:.1f} s, without {ends_s[0]:.1f} s"
            name = f"queue ({policy}, {load.name})"
            figures.append(Figure(name, latencies_s[1], "s", "no queue", latencies_s[0], note))
    return figures
