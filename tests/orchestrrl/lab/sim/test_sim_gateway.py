"""Tests of the simulated gateway against the real one: equal routes and tokens with the same virtual engines."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.operations import (
    EngineRoute,
    MoveRequests,
    Operation,
    OperationId,
    SetRoutes,
)
from orchestrrl.engines.base import Chunk, CompletionEndpoint, Engine, GenerationRequest
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.lab.sim.engines import VirtualEngine
from orchestrrl.lab.sim.gateway import CountedRecord, VirtualGateway
from orchestrrl.lab.sim.workload import SimRequest
from planner.model import ConfigurationId, EngineHealth, EngineId, GpuId, NodeId, RequestId, RequestMove
from tests.orchestrrl.gateway.fakes import GatewayUnderTest, RunningGroup
from tests.orchestrrl.lab.sim.gen_scenarios import kinds, scenario

TICK_S = 0.5
NARROW = kinds(scenario())[ConfigurationId("narrow")]


def virtual_engines(count: int) -> list[VirtualEngine]:
    return [VirtualEngine(EngineId(f"e{n}"), NARROW, (GpuId(n),), f"http://e{n}.sim", 0.0) for n in range(count)]


def routes(engines: Sequence[VirtualEngine]) -> tuple[EngineRoute, ...]:
    profile = NARROW.profile
    return tuple(
        EngineRoute(
            engine.id,
            engine.url,
            EngineHealth.OK,
            kv_capacity_tokens=profile.kv_capacity_tokens,
            kv_free_tokens=profile.kv_capacity_tokens - engine.scheduler.kv_used_tokens,
            max_sequences=profile.max_sequences,
        )
        for engine in engines
    )


@dataclass
class Client:
    """A client of a virtual engine for the real gateway, which streams tokens as they are generated."""

    engine: VirtualEngine
    clock: VirtualClock
    lengths: dict[str, int]
    streams: dict[RequestId, "asyncio.Queue[tuple[int, bool]]"] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.engine.url

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        name = RequestId(request.request_id)
        context_tokens = len(request.body["prompt"])
        left = self.lengths[name.partition("~")[0]] - (context_tokens - PROMPT_TOKENS)
        self.tick()
        self.engine.scheduler.submit(self.clock.now_s(), name, context_tokens, left)
        self.streams[name] = asyncio.Queue()
        try:
            while True:
                tokens, last = await self.streams[name].get()
                yield Chunk((7,) * tokens, finish_reason="stop" if last else None)
                if last:
                    return
        finally:
            del self.streams[name]
            self.engine.scheduler.abort([name])

    def tick(self) -> None:
        for made in self.engine.advance(self.clock.now_s()):
            if made.id in self.streams:
                self.streams[made.id].put_nowait((made.tokens, made.finished_s is not None))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Do nothing: closing the stream has already stopped the request."""

    async def capabilities(self) -> Any:
        return self.engine.features

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)

    async def close(self) -> None:
        """Do nothing: the client holds no connection."""


PROMPT_TOKENS = 40
LENGTHS = {f"r{n}": 60 + 37 * n % 400 for n in range(24)}
MOVES = (("r5", 2.0), ("r9", 2.0), ("r7", 3.0))  # each to the next engine, at that time


async def through_the_real_gateway() -> tuple[dict[str, str], dict[str, int], int]:
    clock = VirtualClock()
    clients = {engine.url: Client(engine, clock, LENGTHS) for engine in virtual_engines(3)}
    fleet = EngineBackends(lambda url: cast(Engine, clients[url]), clock=clock)
    fleet.set_routes(routes([client.engine for client in clients.values()]))
    gateway = GatewayUnderTest(NodeId("gateway"), fleet, limits=RelayLimits())
    jobs: list[RunningGroup] = []
    for name in LENGTHS:
        body = {"prompt": [1] * PROMPT_TOKENS, "max_tokens": 2000}
        ask = read_completion_request(
            CompletionEndpoint.COMPLETIONS,
            body,
            request_id=name,
            group="",
            tag="",
            default_model="m",
            now_s=clock.now_s(),
        )
        jobs.append(await gateway.request_group(ask).__aenter__())
        await clock.advance(0.0)
    began = {record.id: str(record.engine) for job in jobs for record in job.records}
    moving: list[asyncio.Task[Any]] = []
    while not all(job.done for job in jobs):
        assert clock.now_s() < 600
        await clock.advance(TICK_S)
        for client in clients.values():
            client.tick()
        await clock.advance(0.0)
        moving += [
            asyncio.create_task(gateway.move([move]))
            for move in due(
                clock, {record.id: record.engine for job in jobs for record in job.records if not record.done}
            )
        ]
        await clock.advance(0.0)
    tokens = {record.id: len(record.generated_ids) for job in jobs for record in job.records}
    for job in jobs:
        await job.__aexit__()
    await fleet.close()
    return began, tokens, gateway.tokens_recomputed


async def through_the_simulated_gateway() -> tuple[dict[str, str], dict[str, int], int]:
    clock = VirtualClock()
    engines = {engine.url: engine for engine in virtual_engines(3)}
    tokens: dict[str, int] = {}

    def arrive(record: CountedRecord, engine: VirtualEngine, source: VirtualEngine | None) -> None:
        gateway.progressed(engine, engine.advance(clock.now_s()), clock.now_s())
        gateway.tokens_recomputed += record.context_tokens if source is not None else 0
        engine.scheduler.submit(clock.now_s(), record.id, record.context_tokens, record.left_tokens)

    def finished(record: CountedRecord) -> None:
        tokens[record.id] = record.generated

    gateway = VirtualGateway(NodeId("gateway"), clock, engines.__getitem__, arrive, finished)
    gateway.perform(Operation(OperationId("1"), 1, 10.0, SetRoutes(routes(list(engines.values())))))
    gateway.submit(
        [SimRequest(RequestId(name), "", PROMPT_TOKENS, length, 0, 2000) for name, length in LENGTHS.items()]
    )
    began = {record.id: str(record.engine) for record in gateway.records.values()}
    while gateway.records:
        await clock.advance(TICK_S)
        for engine in engines.values():
            gateway.progressed(engine, engine.advance(clock.now_s()), clock.now_s())
        for move in due(clock, {record.id: record.engine for record in gateway.records.values()}):
            gateway.perform(Operation(OperationId("2"), 1, clock.now_s() + 1, MoveRequests((move,))))
    await gateway.fleet.close()
    return began, tokens, gateway.tokens_recomputed


def due(clock: VirtualClock, where: dict[RequestId, EngineId | None]) -> list[RequestMove]:
    found = []
    for name, at_s in MOVES:
        engine = where.get(RequestId(name))
        if engine is not None and clock.now_s() == at_s:
            target = EngineId(f"e{(int(engine[1:]) + 1) % 3}")
            found.append(RequestMove(RequestId(name), engine, target))
    return found


async def test_simulated_gateway_matches_the_real_one() -> None:
    real, simulated = await through_the_real_gateway(), await through_the_simulated_gateway()
    assert simulated[0] == real[0]  # the first engine of each request
    assert simulated[1] == real[1] == LENGTHS
    assert real[2] > 0
    assert simulated[2] == pytest.approx(real[2])
