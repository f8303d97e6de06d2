"""One agent: watches its engines, reports them on one stream, carries out operations on them."""

import asyncio
import random
import uuid
from collections.abc import Mapping

from orchestrrl import __version__
from orchestrrl.agent.health import HealthLimits
from orchestrrl.agent.operations import EngineOperations
from orchestrrl.agent.watch import Describe, EngineWatch, Observation
from orchestrrl.core.addresses import host_id
from orchestrrl.core.clock import Clock
from orchestrrl.core.nodes import NodeHello, NodeKind
from orchestrrl.engines.base import Engine
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.rpc.channel import first_of
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.node import NodeLink, ReportStream
from orchestrrl.rpc.pb import telemetry_pb2
from planner.model import EngineId, NodeId


class UnsentObservations:
    """The newest observation of each engine that is still to be sent. An unsent older one is dropped: late, it lies."""

    def __init__(self, agent_id: NodeId, incarnation: str = "") -> None:
        self._agent_id = agent_id
        self._incarnation = incarnation
        self._pending: dict[EngineId, Observation] = {}
        self._filled = asyncio.Event()
        self._sequence = 0
        self._sent_capabilities: dict[EngineId, object] = {}  # capabilities, as last sent on this stream

    def put(self, observation: Observation) -> None:
        self._pending.pop(observation.engine, None)
        self._pending[observation.engine] = observation
        self._filled.set()

    def start_stream(self) -> None:
        """A new stream knows nothing: what the engines offer is said again."""
        self._sent_capabilities.clear()

    async def next_report(self) -> EngineReport:
        while not self._pending:
            self._filled.clear()
            await self._filled.wait()
        engine_id = next(iter(self._pending))
        observation = self._pending.pop(engine_id)
        self._sequence += 1
        told = self._sent_capabilities.get(engine_id) == observation.capabilities
        self._sent_capabilities[engine_id] = observation.capabilities
        return EngineReport(
            agent=self._agent_id,
            sequence=self._sequence,
            engine=engine_id,
            url=observation.url,
            health=observation.health,
            health_detail=observation.health_detail,
            sample=observation.sample,
            capabilities=None if told else observation.capabilities,
            incarnation=self._incarnation,
            server=observation.server,
        )


class Agent:
    """Runs until cancelled. The engines are the caller's to close."""

    def __init__(
        self,
        agent_id: NodeId,
        engines: Mapping[EngineId, Engine],
        daemon: str,
        *,
        clock: Clock,
        rng: random.Random,
        interval_s: float = 0.25,
        limits: HealthLimits | None = None,
        describe: Describe | None = None,
    ) -> None:
        if not engines:
            raise ValueError("an agent needs at least one engine")
        incarnation = uuid.uuid4().hex
        self._outgoing = UnsentObservations(agent_id, incarnation)
        self._watches = [
            EngineWatch(
                engine_id,
                engine,
                self._outgoing.put,
                clock=clock,
                interval_s=interval_s,
                limits=limits,
                describe=describe,
            )
            for engine_id, engine in engines.items()
        ]
        hello = NodeHello(
            agent_id, NodeKind.AGENT, tuple(engines), __version__, incarnation=incarnation, host=host_id()
        )
        self._link = NodeLink(
            daemon, node_codec.HELLO.to_pb(hello), EngineOperations(agent_id, engines).run, clock=clock, rng=rng
        )
        self._stream = ReportStream(
            daemon,
            "ReportEngines",
            self._make_report,
            0.0,  # the watches set the pace
            clock=clock,
            rng=rng,
            on_open=self._outgoing.start_stream,
        )

    async def run(self) -> None:
        await first_of(self._link.run(), self._stream.run(), *(watch.run() for watch in self._watches))

    async def _make_report(self) -> telemetry_pb2.EngineReport:
        return telemetry_codec.ENGINE_REPORT.to_pb(await self._outgoing.next_report())
