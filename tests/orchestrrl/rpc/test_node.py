"""Nodes against a real gRPC server that dies and returns on the same port."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OutcomeUnknown, Permanent
from orchestrrl.core.operations import Operation, OperationResult, OperationStatus
from orchestrrl.rpc.channel import SERVER_OPTIONS, Backoff
from orchestrrl.rpc.node import NodeLink, ReportStream
from orchestrrl.rpc.pb import agent_pb2 as pb
from orchestrrl.rpc.pb import agent_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from planner.model import NodeId
from tests.orchestrrl.gateway.processes import free_port

DONE = pb.OPERATION_STATUS_DONE
REFUSED = pb.OPERATION_STATUS_REFUSED
FAILED = pb.OPERATION_STATUS_FAILED
UNKNOWN = pb.OPERATION_STATUS_UNKNOWN


async def eventually(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


def operation(operation_id: str, generation: int = 1, valid_until_unix_s: float = 1e12) -> pb.Operation:
    return pb.Operation(
        operation_id=operation_id,
        generation=generation,
        valid_until_unix_s=valid_until_unix_s,
        cancel_requests=pb.CancelRequests(reason="enough"),
    )


class Handler:
    """Counts its calls; with `hold` it waits until `release` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.error: Exception | None = None

    async def __call__(self, operation: Operation) -> OperationResult:
        self.calls.append(operation.id)
        await self.release.wait()
        if self.error:
            raise self.error
        return OperationResult(operation.id, NodeId("n0"), OperationStatus.DONE, f"call {len(self.calls)}")


class Daemon(agent_pb2_grpc.NodeServicer, telemetry_pb2_grpc.TelemetryServicer):
    """A server that sends given operations to any attached node, and records received messages."""

    def __init__(self, port: int, orders: list[pb.Operation]) -> None:
        self.port = port
        self.orders = orders
        self.hellos: list[pb.NodeHello] = []
        self.results: list[pb.OperationResult] = []
        self.reports: list[telemetry_pb2.EngineReport] = []
        self.hang_up = False
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        agent_pb2_grpc.add_NodeServicer_to_server(self, self._server)
        telemetry_pb2_grpc.add_TelemetryServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{port}")

    async def start(self) -> None:
        await self._server.start()

    async def die(self) -> None:
        await self._server.stop(grace=None)

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.NodeMessage], context: object
    ) -> AsyncIterator[pb.Operation]:
        self.hellos.append((await anext(request_iterator)).hello)
        for order in self.orders:
            yield order
        async for message in request_iterator:
            self.results.append(message.result)

    async def ReportEngines(  # type: ignore[override]
        self, request_iterator: AsyncIterator[telemetry_pb2.EngineReport], context: object
    ) -> AsyncIterator[telemetry_pb2.ReportAck]:
        async for report in request_iterator:
            self.reports.append(report)
            yield telemetry_pb2.ReportAck(sequence=report.sequence, generation=1)
            if self.hang_up:
                return

    def ReportRequests(self, request_iterator: object, context: object) -> AsyncIterator[telemetry_pb2.ReportAck]:  # type: ignore[override]
        raise NotImplementedError


@pytest.fixture
def port() -> int:
    return free_port()


@contextlib.asynccontextmanager
async def running(service: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(service())
    try:
        yield
        assert not task.done(), "it must not end by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def link(port: int, handler: Handler) -> NodeLink:
    hello = pb.NodeHello(node_id="n0", kind=pb.NODE_KIND_AGENT, engine_ids=["e0"])
    return NodeLink(f"127.0.0.1:{port}", hello, handler, clock=WallClock())


class TestNodeLink:
    async def test_link_waits_for_daemon_to_start(self, port: int) -> None:
        node = link(port, Handler())
        async with running(node.run):
            await asyncio.sleep(0.3)
            assert not node.connected
            daemon = Daemon(port, [operation("a")])
            await daemon.start()
            await eventually(lambda: len(daemon.results) == 1)
            assert node.connected
            assert daemon.hellos[0].node_id == "n0"
            assert (daemon.results[0].status, daemon.results[0].node_id) == (DONE, "n0")
            await daemon.die()

    async def test_node_reattaches_after_restart_and_runs_no_operation_twice(self, port: int) -> None:
        handler = Handler()
        node = link(port, handler)
        async with running(node.run):
            for restart in range(3):
                daemon = Daemon(port, [operation("a"), operation("b")])
                await daemon.start()
                await eventually(lambda daemon=daemon: len(daemon.results) == 2)  # type: ignore[misc]
                assert node.connected, restart
                await daemon.die()
                await eventually(lambda: not node.connected)
        assert sorted(handler.calls) == ["a", "b"]

    async def test_unsent_result_is_sent_after_reattaching(self, port: int) -> None:
        handler = Handler()
        handler.release.clear()
        node = link(port, handler)
        first, second = Daemon(port, [operation("a")]), Daemon(port, [])
        async with running(node.run):
            await first.start()
            await eventually(lambda: handler.calls == ["a"])
            await first.die()
            await eventually(lambda: not node.connected)
            handler.release.set()
            await second.start()
            await eventually(lambda: len(second.results) == 1)
            assert (second.results[0].operation_id, second.results[0].status) == ("a", DONE)
            await second.die()
        assert first.results == []

    @pytest.mark.parametrize(
        ("error", "status", "detail"),
        [
            (Permanent("no engine e9 here"), FAILED, "no engine e9 here"),
            (OutcomeUnknown("connection broke"), UNKNOWN, "connection broke"),
            (KeyError("defect"), UNKNOWN, "unexpected exception: KeyError('defect')"),
        ],
    )
    async def test_errors_become_results_and_the_link_stays_up(
        self, port: int, error: Exception, status: int, detail: str
    ) -> None:
        handler = Handler()
        handler.error = error
        node = link(port, handler)
        expired, no_operation = operation("c", valid_until_unix_s=1.0), pb.Operation(operation_id="d")
        daemon = Daemon(port, [operation("a"), operation("b"), expired, no_operation])
        await daemon.start()
        async with running(node.run):
            await eventually(lambda: len(daemon.results) == 4)
            results = {result.operation_id: (result.status, result.detail) for result in daemon.results}
            assert results["a"] == results["b"] == (status, detail)
            assert results["c"][0] == REFUSED
            assert results["d"][0] == FAILED
            assert results["d"][1].startswith("invalid operation")
            assert {result.node_id for result in daemon.results} == {"n0"}
            assert len(daemon.hellos) == 1
        await daemon.die()


class TestReportStream:
    async def test_reports_resume_after_each_disconnect(self, port: int) -> None:
        sequence = 0
        opened: list[int] = []
        acked: list[int] = []

        async def make_report() -> telemetry_pb2.EngineReport:
            nonlocal sequence
            sequence += 1
            return telemetry_pb2.EngineReport(agent_id="n0", sequence=sequence)

        stream = ReportStream(
            f"127.0.0.1:{port}",
            "ReportEngines",
            make_report,
            0.01,
            clock=WallClock(),
            on_ack=lambda ack: acked.append(ack.sequence),
            on_open=lambda: opened.append(sequence),
        )
        async with running(stream.run):
            for hang_up in (False, True, False):
                daemon = Daemon(port, [])
                daemon.hang_up = hang_up
                await daemon.start()
                await eventually(lambda daemon=daemon: len(daemon.reports) >= 3)  # type: ignore[misc]
                await daemon.die()
                await eventually(lambda: not stream.connected)
        assert len(opened) >= 5  # three daemons, one of which disconnects after each report
        assert acked == sorted(set(acked))

    async def test_exception_in_make_report_does_not_end_reporting(self, port: int) -> None:
        calls = 0

        async def make_report() -> telemetry_pb2.EngineReport:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyError("defect")
            return telemetry_pb2.EngineReport(sequence=calls)

        daemon = Daemon(port, [])
        await daemon.start()
        stream = ReportStream(f"127.0.0.1:{port}", "ReportEngines", make_report, 0.01, clock=WallClock())
        async with running(stream.run):
            await eventually(lambda: len(daemon.reports) >= 2)
        await daemon.die()


def test_backoff_starts_fast_and_stays_under_its_cap() -> None:
    backoff, rng = Backoff(first_s=0.1, cap_s=1.0), random.Random(7)
    for _ in range(50):
        assert 0.05 <= backoff.delay_s(1, rng) <= 0.1
        assert 0.5 <= backoff.delay_s(rng.randint(5, 10_000), rng) <= 1.0
    with pytest.raises(ValueError, match="first_s"):
        Backoff(first_s=2.0, cap_s=1.0)
