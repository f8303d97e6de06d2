"""Watch the engines of one agent and report their state to the daemon on one stream."""

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace

from orchestrrl import __version__
from orchestrrl.agent.watch import Describe, EngineWatch, HealthLimits
from orchestrrl.core.addresses import host_id
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.nodes import NodeHello, NodeKind
from orchestrrl.core.operations import Operation, OperationResult
from orchestrrl.engines.base import Engine
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.rpc.channel import first_of
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.node import NodeLink, ReportStream
from orchestrrl.rpc.pb import telemetry_pb2
from planner.model import EngineId, NodeId


class UnsentReports:
    """A queue of the newest unsent report of each engine. Older unsent reports are dropped, since they are outdated."""

    def __init__(self, incarnation: str = "") -> None:
        self._incarnation = incarnation
        self._pending: dict[EngineId, EngineReport] = {}
        self._filled = asyncio.Event()
        self._sequence = 0
        self._sent_capabilities: dict[EngineId, object] = {}  # capabilities, as last sent on this stream

    def put(self, report: EngineReport) -> None:
        self._pending.pop(report.engine, None)
        self._pending[report.engine] = report
        self._filled.set()

    def start_stream(self) -> None:
        """Begin a new stream, on which all capabilities are sent again."""
        self._sent_capabilities.clear()

    async def next_report(self) -> EngineReport:
        while not self._pending:
            self._filled.clear()
            await self._filled.wait()
        report = self._pending.pop(next(iter(self._pending)))
        self._sequence += 1
        is_new = self._sent_capabilities.get(report.engine) != report.capabilities
        self._sent_capabilities[report.engine] = report.capabilities
        capabilities = report.capabilities if is_new else None
        return replace(report, sequence=self._sequence, capabilities=capabilities, incarnation=self._incarnation)


class Agent:
    """Watches engines and reports their state to the daemon until cancelled. The caller closes the engine clients."""

    def __init__(
        self,
        agent_id: NodeId,
        engines: Mapping[EngineId, Engine],
        daemon: str,
        *,
        clock: Clock,
        interval_s: float = 0.25,
        limits: HealthLimits | None = None,
        describe: Describe | None = None,
    ) -> None:
        self._id = agent_id
        incarnation = uuid.uuid4().hex
        self._outgoing = UnsentReports(incarnation)
        self._watches = [
            EngineWatch(
                engine_id,
                engine,
                self._outgoing.put,
                agent=agent_id,
                clock=clock,
                interval_s=interval_s,
                limits=limits or HealthLimits(),
                describe=describe,
            )
            for engine_id, engine in engines.items()
        ]
        hello = NodeHello(
            agent_id, NodeKind.AGENT, tuple(engines), __version__, incarnation=incarnation, host=host_id()
        )
        self._link = NodeLink(daemon, node_codec.HELLO.to_pb(hello), self._refuse, clock=clock)
        self._stream = ReportStream(
            daemon,
            "ReportEngines",
            self._make_report,
            0.0,  # the watches set the pace
            clock=clock,
            on_open=self._outgoing.start_stream,
        )

    async def run(self) -> None:
        await first_of(self._link.run(), self._stream.run(), *(watch.run() for watch in self._watches))

    async def _make_report(self) -> telemetry_pb2.EngineReport:
        return telemetry_codec.ENGINE_REPORT.to_pb(await self._outgoing.next_report())

    async def _refuse(self, operation: Operation) -> OperationResult:
        """Raise Permanent for any order of the daemon, because agents carry out no orders. The link returns the error
        as a failed result."""
        raise Permanent(
            f"agent {self._id} cannot carry out operation {operation.action.kind}: only gateways carry out operations"
        )
