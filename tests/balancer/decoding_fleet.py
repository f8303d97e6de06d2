"""A simple simulation of a decoding fleet with known output lengths.

Engines admit first come, first served while blocks for the context are free, and preempt the request admitted last.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from balancer.balance import BalanceSituation
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    Mode,
    RequestId,
    RequestMove,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.workload.remaining_tokens import KnownLengths

BLOCK = 16
SEATS = 8
ALIKE = ConfigurationId("alike")


@dataclass
class Sequence:
    name: str
    prompt: int
    length: int
    generated: int = 0
    moves: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.generated


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass
class Decoder:
    blocks: int
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    preemptions: int = 0

    def used(self) -> int:
        return sum(blocks(one.context) for one in self.running)

    def iterate(self) -> None:
        """Generate one token for each running request that has room, then admit waiting requests."""
        while sum(blocks(one.context + 1) for one in self.running) > self.blocks:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        while self.waiting and len(self.running) < SEATS:
            needed = sum(blocks(one.context + 1) for one in [*self.running, self.waiting[0]])
            if needed > self.blocks:
                break
            self.running.append(self.waiting.pop(0))
        for one in self.running:
            one.generated += 1
        self.running = [one for one in self.running if one.generated < one.length]


class DecodingFleet:
    """A fleet of simulated engines. If `crowded`, requests also wait; if `told`, the lengths are reported."""

    def __init__(self, seed: int, engines: int = 3, *, crowded: bool = False, told: bool = True) -> None:
        self._told = told
        rng = random.Random(seed)
        capacity = rng.choice([90, 130, 200])
        self.decoders = {EngineId(f"e{i}"): Decoder(capacity) for i in range(engines)}
        self.paces = {engine: rng.choice([1, 1, 1, 2]) for engine in self.decoders}  # iterations at a time
        self.lengths: dict[RequestId, int] = {}
        for place, (engine, decoder) in enumerate(self.decoders.items()):
            most = 10 if crowded else 7
            for number in range(rng.choice([0, 2, most, most])):
                length = rng.choice([30, 200, rng.randint(1, 700)])
                one = Sequence(f"{engine}-r{number}-{place}", rng.randint(1, 200), length)
                one.generated = rng.randint(0, length - 1)
                self.lengths[RequestId(one.name)] = length
                fits = decoder.used() + blocks(one.context + 1) <= capacity and len(decoder.running) < SEATS
                if fits and not decoder.waiting:
                    decoder.running.append(one)
                elif crowded and blocks(one.prompt + one.length) <= capacity:
                    decoder.waiting.append(one)
                else:
                    del self.lengths[RequestId(one.name)]

    @property
    def preemptions(self) -> Mapping[EngineId, int]:
        return {engine: decoder.preemptions for engine, decoder in self.decoders.items()}

    @property
    def busy(self) -> bool:
        return any(decoder.running or decoder.waiting for decoder in self.decoders.values())

    def iterate(self, times: int) -> None:
        for engine, decoder in self.decoders.items():
            for _ in range(times * self.paces[engine]):
                decoder.iterate()

    def take_out(self, move: RequestMove) -> Sequence | None:
        """Remove and return a request; None if it has ended meanwhile."""
        source = self.decoders[move.from_engine]
        for queue in (source.running, source.waiting):
            for one in queue:
                if one.name == move.request:
                    queue.remove(one)
                    one.moves += 1
                    return one
        return None

    def put(self, move: RequestMove, one: Sequence) -> None:
        self.decoders[move.to_engine].waiting.append(one)

    def snapshot(self, now_s: float) -> Snapshot:
        configuration = self.configuration()
        engines, requests = [], []
        for engine, decoder in self.decoders.items():
            kv_tokens = sum(one.context for one in decoder.running)
            pace = len(decoder.running) / configuration.step_s(len(decoder.running), kv_tokens) * self.paces[engine]
            engines.append(
                EngineView(
                    id=engine,
                    url="",
                    configuration=ALIKE,
                    health=EngineHealth.OK,
                    running=len(decoder.running),
                    waiting=len(decoder.waiting),
                    kv_capacity_tokens=decoder.blocks * BLOCK,
                    kv_free_tokens=(decoder.blocks - decoder.used()) * BLOCK,
                    max_sequences=SEATS,
                    decode_tokens_per_s=pace or None,
                    age_s=0.1,
                )
            )
            for state, queue in ((RequestState.RUNNING, decoder.running), (RequestState.WAITING, decoder.waiting)):
                requests += [
                    RequestView(RequestId(one.name), engine, state, one.prompt, one.generated, moves=one.moves)
                    for one in queue
                ]
        return Snapshot(now_s, tuple(engines), tuple(requests), requests_age_s=0.1, step_started_s=-100.0)

    def configuration(self) -> Configuration:
        capacity_tokens = BLOCK * next(iter(self.decoders.values())).blocks
        return Configuration(ALIKE, 1, 0.01, 1e-3, 1e-6, capacity_tokens, SEATS, 1e5, 1.0)

    def situation(self, snapshot: Snapshot) -> BalanceSituation:
        if not self._told:
            return BalanceSituation(Mode.ACT)
        left = {view.id: float(self.lengths[view.id] - view.generated_tokens) for view in snapshot.requests}
        return BalanceSituation(
            Mode.ACT,
            configurations=(self.configuration(),),
            remaining_tokens=left,
            distributions=KnownLengths(self.lengths),
        )
