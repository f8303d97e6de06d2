"""Tests of an agent's reports, and its answers to orders, against a real gRPC server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from fake_engine import FakeEngine

from orchestrrl.agent.sidecar import Agent, UnsentReports
from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import Retryable
from orchestrrl.core.operations import (
    Action,
    MoveRequests,
    Operation,
    OperationId,
)
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.pb import agent_pb2, agent_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from planner.model import EngineHealth, EngineId, NodeId

E0, E1 = EngineId("e0"), EngineId("e1")


def report(engine: EngineId, detail: str = "", version: str | None = "1") -> EngineReport:
    capabilities = None if version is None else EngineCapabilities("fake", version, ())
    return EngineReport(NodeId("a"), 0, engine, "http://x:1", EngineHealth.OK, detail, None, capabilities)


class TestOutgoing:
    async def test_only_the_newest_report_of_each_engine_is_sent(self) -> None:
        outgoing = UnsentReports()
        for engine, detail in ((E0, "old"), (E1, "only"), (E0, "new")):
            outgoing.put(report(engine, detail))
        reports = [await outgoing.next_report() for _ in range(2)]
        assert [(r.engine, r.health_detail, r.sequence) for r in reports] == [(E1, "only", 1), (E0, "new", 2)]
        waiting = asyncio.create_task(outgoing.next_report())
        await asyncio.sleep(0)
        assert not waiting.done()
        outgoing.put(report(E0, "newer"))
        assert (await waiting).health_detail == "newer"

    async def test_capabilities_are_sent_once_per_stream_and_when_they_change(self) -> None:
        outgoing = UnsentReports()

        async def reported(version: str | None) -> str | None:
            outgoing.put(report(E0, version=version))
            capabilities = (await outgoing.next_report()).capabilities
            return capabilities.version if capabilities else None

        assert [await reported(v) for v in ("1", "1", "2", "2", None, "2")] == ["1", None, "2", None, None, "2"]
        outgoing.start_stream()
        assert [await reported(v) for v in ("2", "2")] == ["2", None]


def order(action: Action) -> Operation:
    return Operation(OperationId("op"), 1, 1e12, action)


class Daemon(agent_pb2_grpc.NodeServicer, telemetry_pb2_grpc.TelemetryServicer):
    """A daemon that sends the given orders and records what it receives."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[agent_pb2.Operation] = asyncio.Queue()
        self.hello: agent_pb2.NodeHello | None = None
        self.results: list[agent_pb2.OperationResult] = []
        self.reports: list[telemetry_pb2.EngineReport] = []

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[agent_pb2.NodeMessage], context: object
    ) -> AsyncIterator[agent_pb2.Operation]:
        self.hello = (await anext(request_iterator)).hello
        while True:
            yield await self.orders.get()
            self.results.append((await anext(request_iterator)).result)

    async def ReportEngines(  # type: ignore[override]
        self, request_iterator: AsyncIterator[telemetry_pb2.EngineReport], context: object
    ) -> AsyncIterator[telemetry_pb2.ReportAck]:
        async for report in request_iterator:
            self.reports.append(report)
            yield telemetry_pb2.ReportAck(sequence=report.sequence, generation=1)

    def ReportRequests(self, request_iterator: object, context: object) -> AsyncIterator[telemetry_pb2.ReportAck]:  # type: ignore[override]
        raise NotImplementedError


@pytest.fixture
async def daemon() -> AsyncIterator[tuple[Daemon, str]]:
    server, servicer = grpc.aio.server(options=SERVER_OPTIONS), Daemon()
    agent_pb2_grpc.add_NodeServicer_to_server(servicer, server)
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(grace=None)


async def test_agent_of_two_engines_reports_both_and_refuses_orders(daemon: tuple[Daemon, str]) -> None:
    servicer, address = daemon
    clock = WallClock()
    good, bad = FakeEngine(clock), FakeEngine(clock, error=Retryable("connection refused", 1.0))
    good.current = replace(good.current, running=7)
    agent = Agent(NodeId("a0"), {E0: good, E1: bad}, address, clock=clock, interval_s=0.02)
    task = asyncio.create_task(agent.run())

    def newest(engine: EngineId) -> telemetry_pb2.EngineReport | None:
        return next((r for r in reversed(servicer.reports) if r.engine_id == engine), None)

    async with asyncio.timeout(60):
        while newest(E0) is None or newest(E1) is None or len(servicer.reports) < 10 or servicer.hello is None:
            await asyncio.sleep(0.01)
        invalid = agent_pb2.Operation(operation_id="op0", generation=1, valid_until_unix_s=1e12)
        await servicer.orders.put(invalid)
        await servicer.orders.put(node_codec.OPERATION.to_pb(order(MoveRequests(()))))
        await servicer.orders.put(node_codec.OPERATION.to_pb(order(MoveRequests(()))))
        while len(servicer.results) < 3:
            await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

    assert (servicer.hello.node_id, list(servicer.hello.engine_ids)) == ("a0", ["e0", "e1"])
    one, other = newest(E0), newest(E1)
    assert one is not None
    assert other is not None
    assert (one.health, one.sample.running) == (telemetry_pb2.ENGINE_HEALTH_OK, 7)
    assert (other.health, other.health_detail) == (telemetry_pb2.ENGINE_HEALTH_GONE, "connection refused")
    assert not other.HasField("sample")
    reported = [report for report in servicer.reports if report.HasField("capabilities")]
    assert [(report.engine_id, report.capabilities.pause) for report in reported] == [("e0", True)]
    sequences = [report.sequence for report in servicer.reports]
    assert sequences == sorted(set(sequences))
    malformed, refused, again = servicer.results
    assert malformed.detail.startswith("invalid operation")
    assert refused == again
    assert refused.detail == "agent a0 cannot carry out operation move_requests: only gateways carry out operations"
    assert {result.status for result in servicer.results} == {agent_pb2.OPERATION_STATUS_FAILED}
