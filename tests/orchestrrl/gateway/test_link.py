"""The gateway with a daemon, and after the daemon has gone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import (
    Action,
    EngineRoute,
    MoveRequests,
    Operation,
    OperationId,
    OperationResult,
    OperationStatus,
    SetRoutes,
)
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.fleet.reports import GatewayReport, ReportAck
from orchestrrl.gateway.http.completion_requests import CompletionRequest, read_completion_request
from orchestrrl.gateway.link import GatewayLink
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.codecs.node import OPERATION, RESULT
from orchestrrl.rpc.codecs.telemetry import ACK, GATEWAY_REPORT
from orchestrrl.rpc.pb import agent_pb2, agent_pb2_grpc, telemetry_pb2_grpc
from planner.model import EngineHealth, EngineId, NodeId, RequestId, RequestMove
from tests.orchestrrl.gateway.fakes import FakeEngine, GatewayUnderTest, undisturbed

PROMPT = list(b"hello")
FAR_S = 1e12


class Daemon(agent_pb2_grpc.NodeServicer, telemetry_pb2_grpc.TelemetryServicer):
    """A fake daemon that stores the received reports, and sends the operations that the test puts into `orders`."""

    def __init__(self) -> None:
        self.hellos: list[agent_pb2.NodeHello] = []
        self.results: dict[str, OperationResult] = {}
        self.reports: list[GatewayReport] = []
        self.orders: asyncio.Queue[agent_pb2.Operation] = asyncio.Queue()
        self.acknowledges = True

    async def Attach(self, requests, context):  # type: ignore[no-untyped-def]
        reading = asyncio.create_task(self._read(requests))
        try:
            while True:
                yield await self.orders.get()
        finally:
            reading.cancel()

    async def _read(self, requests) -> None:  # type: ignore[no-untyped-def]
        async for message in requests:
            if message.HasField("hello"):
                self.hellos.append(message.hello)
            else:
                result = RESULT.from_pb(message.result)
                self.results[result.operation] = result

    async def ReportRequests(self, requests, context):  # type: ignore[no-untyped-def]
        async for message in requests:
            report = GATEWAY_REPORT.from_pb(message)
            self.reports.append(report)
            if self.acknowledges:
                yield ACK.to_pb(ReportAck(report.sequence, 1))

    def order(self, name: str, action: Action) -> None:
        self.orders.put_nowait(OPERATION.to_pb(Operation(OperationId(name), 1, FAR_S, action)))

    async def serve(self, address: str) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        agent_pb2_grpc.add_NodeServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        telemetry_pb2_grpc.add_TelemetryServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(address)
        await server.start()
        return server


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


class Harness:
    def __init__(self, address: str) -> None:
        self.address = address
        self.engines = {name: FakeEngine(url=f"http://{name}") for name in ("e0", "e1")}
        by_url = {engine.url: engine for engine in self.engines.values()}
        clock = WallClock()
        self.fleet = EngineBackends(lambda url: by_url[url], clock=clock)
        self.gateway = GatewayUnderTest(NodeId("g"), self.fleet, limits=RelayLimits())
        self.gateway.url = "http://gateway"
        self.link = GatewayLink(self.gateway, address, report_interval_s=0.02)
        self.daemon = Daemon()


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(f"unix:{tmp_path}/daemon.sock")
    server = await harness.daemon.serve(harness.address)
    running = asyncio.create_task(harness.link.run())
    yield harness
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await harness.fleet.close()
    await server.stop(None)


def routes(**draining: bool) -> SetRoutes:
    return SetRoutes(
        tuple(EngineRoute(EngineId(n), f"http://{n}", EngineHealth.OK, draining=d) for n, d in draining.items())
    )


def ask(harness: Harness, name: str) -> CompletionRequest:
    body = {"prompt": PROMPT, "max_tokens": 50, "min_tokens": 50}
    now_s = harness.gateway.clock.now_s()
    return read_completion_request(
        CompletionEndpoint.COMPLETIONS, body, request_id=name, group="g1", tag="t", default_model="", now_s=now_s
    )


async def step(harness: Harness, times: int) -> None:
    for _ in range(times):
        for engine in harness.engines.values():
            engine.step()
        await asyncio.sleep(0.001)


async def test_link_carries_out_orders_and_reports_requests(harness: Harness) -> None:
    daemon = harness.daemon
    await eventually(lambda: bool(daemon.hellos))
    assert (daemon.hellos[0].node_id, daemon.hellos[0].kind) == ("g", agent_pb2.NODE_KIND_GATEWAY)
    assert daemon.hellos[0].url == "http://gateway"
    daemon.order("routes", routes(e0=False, e1=True))
    await eventually(lambda: "routes" in daemon.results)
    assert daemon.results["routes"].status is OperationStatus.DONE
    assert [backend.id for backend in harness.gateway.fleet if backend.usable] == ["e0"]

    async with harness.gateway.request_group(ask(harness, "r")) as job:
        await eventually(lambda: bool(harness.engines["e0"].attempts))
        await step(harness, 10)
        await eventually(lambda: bool(daemon.reports[-1].in_flight))
        await eventually(lambda: daemon.reports[-1].in_flight[0].generated_tokens == 10)
        (seen,) = daemon.reports[-1].in_flight
        assert (seen.id, seen.engine, seen.group, seen.tag, seen.movable) == ("r", "e0", "g1", "t", True)

        daemon.order("routes2", routes(e0=False, e1=False))
        await eventually(lambda: "routes2" in daemon.results)
        there = RequestMove(RequestId("r"), EngineId("e0"), EngineId("e1"))
        lost = RequestMove(RequestId("x"), EngineId("e0"), EngineId("e1"))
        daemon.order("move", MoveRequests((there, lost)))
        daemon.order("move", MoveRequests((there, lost)))  # delivered twice, carried out once
        await eventually(lambda: bool(harness.engines["e1"].attempts))
        await step(harness, 1)
        await eventually(lambda: "move" in daemon.results)
        result = daemon.results["move"]
        assert result.status is OperationStatus.PARTIAL
        assert [(item.id, item.done, item.detail) for item in result.items] == [
            ("r", True, ""),
            ("x", False, "no such request"),
        ]
        assert result.items[0].recomputed_tokens == len(PROMPT) + 10
        await step(harness, 60)
        await eventually(lambda: job.done)
        (record,) = job.records
        assert list(record.generated_ids) == undisturbed(PROMPT, 50, min_tokens=50)[0]
        assert record.moves == 1

    await eventually(lambda: any(report.finished for report in daemon.reports))
    finished = next(report.finished for report in daemon.reports if report.finished)
    assert [(summary.id, summary.moves, summary.generated_tokens) for summary in finished] == [("r", 1, 50)]
    await eventually(lambda: not daemon.reports[-1].finished and not daemon.reports[-1].in_flight)


async def test_requests_wait_for_engines_that_are_being_started(harness: Harness) -> None:
    harness.daemon.order("routes", SetRoutes((), (EngineId("e0"),), FAR_S))
    await eventually(lambda: "routes" in harness.daemon.results)
    assert harness.fleet.expected == {"e0"}
    async with harness.gateway.request_group(ask(harness, "r")) as job:
        await eventually(lambda: len(harness.fleet.queue) == 1)
        harness.daemon.order("come", routes(e0=False))
        await eventually(lambda: bool(harness.engines["e0"].attempts))
        assert not harness.fleet.expected
        await step(harness, 60)
        await eventually(lambda: job.done)
    # A request that the gateway holds has no source engine.
    harness.daemon.order("none", SetRoutes((), (EngineId("e0"), EngineId("e1")), FAR_S))
    await eventually(lambda: "none" in harness.daemon.results)
    async with harness.gateway.request_group(ask(harness, "s")):
        await eventually(lambda: len(harness.fleet.queue) == 1)
        harness.daemon.order("move", MoveRequests((RequestMove(RequestId("s"), EngineId(""), EngineId("e1")),)))
        await eventually(lambda: "move" in harness.daemon.results)
        assert harness.daemon.results["move"].status is OperationStatus.DONE
        harness.daemon.order("both", routes(e0=False, e1=False))
        await eventually(lambda: bool(harness.engines["e1"].attempts))


async def test_unsupported_orders_are_refused(harness: Harness) -> None:
    harness.daemon.order("nowhere", SetRoutes((EngineRoute(EngineId("e5"), ""),)))
    await eventually(lambda: "nowhere" in harness.daemon.results)
    assert harness.daemon.results["nowhere"].status is OperationStatus.PARTIAL
    assert "e5" in harness.daemon.results["nowhere"].detail


async def test_last_routes_apply_without_the_daemon(tmp_path: Path) -> None:
    harness = Harness(f"unix:{tmp_path}/daemon.sock")
    server = await harness.daemon.serve(harness.address)
    running = asyncio.create_task(harness.link.run())
    harness.daemon.order("routes", routes(e0=True, e1=False))
    await eventually(lambda: "routes" in harness.daemon.results)
    await server.stop(None)

    async with harness.gateway.request_group(ask(harness, "r")) as job:
        await eventually(lambda: bool(harness.engines["e1"].attempts))
        await step(harness, 60)
        await eventually(lambda: job.done)
    successor = Daemon()
    server = await successor.serve(harness.address)
    await eventually(lambda: any(report.finished for report in successor.reports))
    assert [summary.id for report in successor.reports[:1] for summary in report.finished] == ["r"]
    await eventually(lambda: bool(successor.hellos))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await harness.fleet.close()
    await server.stop(None)
