"""The gateway under a daemon's orders, and without the daemon."""

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
    ProbeEngine,
    RequestMove,
    SetRoutes,
)
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.fleet.reports import GatewayReport, ReportAck
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.completion_requests import CompletionRequest, read_ask
from orchestrrl.gateway.link import GatewayLink
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.codecs.node import operation_to_pb, result_from_pb
from orchestrrl.rpc.codecs.telemetry import ack_to_pb, gateway_report_from_pb
from orchestrrl.rpc.pb import agent_pb2, agent_pb2_grpc, telemetry_pb2_grpc
from planner.model import EngineHealth, EngineId, NodeId, RequestId
from tests.orchestrrl.gateway.fakes import FakeEngine, undisturbed

PROMPT = list(b"hello")
FAR_S = 1e12


class Daemon(agent_pb2_grpc.NodeServicer, telemetry_pb2_grpc.TelemetryServicer):
    """Keeps what it hears, and sends what the test puts into `orders`."""

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
                result = result_from_pb(message.result)
                self.results[result.operation] = result

    async def ReportRequests(self, requests, context):  # type: ignore[no-untyped-def]
        async for message in requests:
            report = gateway_report_from_pb(message)
            self.reports.append(report)
            if self.acknowledges:
                yield ack_to_pb(ReportAck(report.sequence, 1))

    def order(self, name: str, action: Action) -> None:
        self.orders.put_nowait(operation_to_pb(Operation(OperationId(name), 1, FAR_S, action)))

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


class House:
    def __init__(self, address: str) -> None:
        self.address = address
        self.engines = {name: FakeEngine(url=f"http://{name}") for name in ("e0", "e1")}
        by_url = {engine.url: engine for engine in self.engines.values()}
        clock = WallClock()
        self.fleet = EngineBackends(lambda url: by_url[url], clock=clock)
        self.gateway = Gateway(NodeId("g"), self.fleet, limits=RelayLimits(), clock=clock, url="http://gateway")
        self.link = GatewayLink(self.gateway, address, report_interval_s=0.02, clock=clock)
        self.daemon = Daemon()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(f"unix:{tmp_path}/daemon.sock")
    server = await house.daemon.serve(house.address)
    running = asyncio.create_task(house.link.run())
    yield house
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await house.fleet.close()
    await server.stop(None)


def routes(**draining: bool) -> SetRoutes:
    return SetRoutes(
        tuple(EngineRoute(EngineId(n), f"http://{n}", EngineHealth.OK, draining=d) for n, d in draining.items())
    )


def ask(house: House, name: str) -> CompletionRequest:
    body = {"prompt": PROMPT, "max_tokens": 50, "min_tokens": 50}
    now_s = house.gateway.clock.now_s()
    return read_ask(
        CompletionEndpoint.COMPLETIONS, body, request_id=name, group="g1", tag="t", default_model="", now_s=now_s
    )


async def step(house: House, times: int) -> None:
    for _ in range(times):
        for engine in house.engines.values():
            engine.step()
        await asyncio.sleep(0.001)


async def test_orders_are_carried_out_and_requests_reported(house: House) -> None:
    daemon = house.daemon
    await eventually(lambda: bool(daemon.hellos))
    assert (daemon.hellos[0].node_id, daemon.hellos[0].kind) == ("g", agent_pb2.NODE_KIND_GATEWAY)
    assert daemon.hellos[0].url == "http://gateway"
    daemon.order("routes", routes(e0=False, e1=True))
    await eventually(lambda: "routes" in daemon.results)
    assert daemon.results["routes"].status is OperationStatus.DONE
    assert house.gateway.usable_engines() == ["e0"]

    async with house.gateway.job(ask(house, "r")) as job:
        await eventually(lambda: bool(house.engines["e0"].attempts))
        await step(house, 10)
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
        await eventually(lambda: bool(house.engines["e1"].attempts))
        await step(house, 1)
        await eventually(lambda: "move" in daemon.results)
        result = daemon.results["move"]
        assert result.status is OperationStatus.PARTIAL
        assert [(item.id, item.done, item.detail) for item in result.items] == [
            ("r", True, ""),
            ("x", False, "no such request"),
        ]
        assert result.items[0].recomputed_tokens == len(PROMPT) + 10
        await step(house, 60)
        await eventually(lambda: job.done)
        (record,) = job.records
        assert list(record.generated_ids) == undisturbed(PROMPT, 50, min_tokens=50)[0]
        assert record.moves == 1

    await eventually(lambda: any(report.finished for report in daemon.reports))
    finished = next(report.finished for report in daemon.reports if report.finished)
    assert [(summary.id, summary.moves, summary.generated_tokens) for summary in finished] == [("r", 1, 50)]
    await eventually(lambda: not daemon.reports[-1].finished and not daemon.reports[-1].in_flight)


async def test_engines_that_are_being_started_are_waited_for(house: House) -> None:
    house.daemon.order("routes", SetRoutes((), (EngineId("e0"),), FAR_S))
    await eventually(lambda: "routes" in house.daemon.results)
    assert house.fleet.expected == {"e0"}
    async with house.gateway.job(ask(house, "r")) as job:
        await eventually(lambda: len(house.fleet.queue) == 1)
        house.daemon.order("come", routes(e0=False))
        await eventually(lambda: bool(house.engines["e0"].attempts))
        assert not house.fleet.expected
        await step(house, 60)
        await eventually(lambda: job.done)
    # One that the gateway holds goes where it is sent: there is no engine that it comes from.
    house.daemon.order("none", SetRoutes((), (EngineId("e0"), EngineId("e1")), FAR_S))
    await eventually(lambda: "none" in house.daemon.results)
    async with house.gateway.job(ask(house, "s")):
        await eventually(lambda: len(house.fleet.queue) == 1)
        house.daemon.order("move", MoveRequests((RequestMove(RequestId("s"), EngineId(""), EngineId("e1")),)))
        await eventually(lambda: "move" in house.daemon.results)
        assert house.daemon.results["move"].status is OperationStatus.DONE
        house.daemon.order("both", routes(e0=False, e1=False))
        await eventually(lambda: bool(house.engines["e1"].attempts))


async def test_what_gateways_do_not_do_is_said(house: House) -> None:
    house.daemon.order("probe", ProbeEngine(EngineId("e0")))
    house.daemon.order("nowhere", SetRoutes((EngineRoute(EngineId("e5"), ""),)))
    await eventually(lambda: {"probe", "nowhere"} <= house.daemon.results.keys())
    assert house.daemon.results["probe"].status is OperationStatus.FAILED
    assert house.daemon.results["nowhere"].status is OperationStatus.PARTIAL
    assert "e5" in house.daemon.results["nowhere"].detail


async def test_without_the_daemon_its_last_orders_hold(tmp_path: Path) -> None:
    house = House(f"unix:{tmp_path}/daemon.sock")
    server = await house.daemon.serve(house.address)
    running = asyncio.create_task(house.link.run())
    house.daemon.order("routes", routes(e0=True, e1=False))
    await eventually(lambda: "routes" in house.daemon.results)
    await server.stop(None)

    async with house.gateway.job(ask(house, "r")) as job:
        await eventually(lambda: bool(house.engines["e1"].attempts))
        await step(house, 60)
        await eventually(lambda: job.done)
    successor = Daemon()
    server = await successor.serve(house.address)
    await eventually(lambda: any(report.finished for report in successor.reports))
    assert [summary.id for report in successor.reports[:1] for summary in report.finished] == ["r"]
    await eventually(lambda: bool(successor.hellos))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await house.fleet.close()
    await server.stop(None)
