"""Nodes against a real gRPC server that dies and returns on the same port."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from orchestrrl.core.clock import VirtualClock, WallClock
from orchestrrl.core.errors import OutcomeUnknown, Permanent
from orchestrrl.rpc.channel import SERVER_OPTIONS, Backoff
from orchestrrl.rpc.node import NodeLink, OperationLog, ReportStream
from orchestrrl.rpc.pb import agent_pb2 as pb
from orchestrrl.rpc.pb import agent_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
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
        probe_engine=pb.ProbeEngine(engine_id="e0"),
    )


class Handler:
    """Counts what it is asked to do; `hold` makes it wait until `release` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.error: Exception | None = None

    async def __call__(self, operation: pb.Operation) -> pb.OperationResult:
        self.calls.append(operation.operation_id)
        await self.release.wait()
        if self.error:
            raise self.error
        return pb.OperationResult(status=DONE, detail=f"call {len(self.calls)}")


class TestOperationLog:
    async def test_a_repeated_delivery_gets_the_stored_result(self) -> None:
        handler, clock = Handler(), VirtualClock(100.0)
        log = OperationLog("n0", handler, clock=clock)
        first = await log.run(operation("a"))
        again = await log.run(operation("a"))
        assert first == again
        assert (first.status, first.operation_id, first.node_id) == (DONE, "a", "n0")
        assert handler.calls == ["a"]

    async def test_a_running_one_is_joined(self) -> None:
        handler, clock = Handler(), VirtualClock()
        handler.release.clear()
        log = OperationLog("n0", handler, clock=clock)
        deliveries = [asyncio.create_task(log.run(operation("a"))) for _ in range(3)]
        await asyncio.sleep(0)
        deliveries[0].cancel()  # one waiter gone: neither the operation nor the other waiters notice
        await clock.advance(2.5)
        handler.release.set()
        second, third = await asyncio.gather(*deliveries[1:])
        assert second == third
        assert second.duration_s == 2.5
        assert handler.calls == ["a"]

    async def test_past_its_expiry_it_is_refused_but_a_stored_result_still_answers(self) -> None:
        handler, clock = Handler(), VirtualClock(100.0)
        log = OperationLog("n0", handler, clock=clock)
        done = await log.run(operation("a", valid_until_unix_s=101.0))
        await clock.advance(5.0)
        assert await log.run(operation("a", valid_until_unix_s=101.0)) == done
        late = await log.run(operation("b", valid_until_unix_s=101.0))
        assert (late.status, late.detail) == (REFUSED, "expired 4 s ago")
        never = await log.run(operation("c", valid_until_unix_s=0.0))
        assert (never.status, never.detail) == (REFUSED, "carries no expiry")
        assert handler.calls == ["a"]

    async def test_an_older_generation_is_refused(self) -> None:
        handler = Handler()
        log = OperationLog("n0", handler, clock=VirtualClock())
        assert (await log.run(operation("a", generation=3))).status == DONE
        stale = await log.run(operation("b", generation=2))
        assert stale.status == REFUSED
        assert "generation 2 is superseded" in stale.detail
        assert (await log.run(operation("c", generation=3))).status == DONE
        assert (await log.run(operation("a", generation=2))).status == DONE  # known: its result, whoever asks

    @pytest.mark.parametrize("seed", range(20))
    async def test_never_twice_and_never_unbounded(self, seed: int) -> None:
        rng, handler, clock = random.Random(seed), Handler(), VirtualClock(100.0)
        log = OperationLog("n0", handler, clock=clock, capacity=5)
        sent: list[pb.Operation] = []
        for number in range(300):
            if sent and rng.random() < 0.5:
                delivered = rng.choice(sent[-30:])
            else:
                delivered = operation(f"op{number}", rng.randint(1, 3), clock.now_s() + rng.uniform(-1.0, 4.0))
                sent.append(delivered)
            result = await log.run(delivered)
            assert result.status in (DONE, REFUSED)
            assert (result.status == DONE) <= (delivered.operation_id in handler.calls)
            assert len(log) <= 5
            await clock.advance(rng.choice([0.0, 0.0, 0.5]))
        assert len(handler.calls) == len(set(handler.calls))
        assert handler.calls

    async def test_a_full_log_refuses_until_something_expires(self) -> None:
        handler, clock = Handler(), VirtualClock(100.0)
        log = OperationLog("n0", handler, clock=clock, capacity=2)
        for name in "ab":
            assert (await log.run(operation(name, valid_until_unix_s=110.0))).status == DONE
        assert (await log.run(operation("c", valid_until_unix_s=130.0))).status == REFUSED
        await clock.advance(11.0)
        assert (await log.run(operation("c", valid_until_unix_s=130.0))).status == DONE

    @pytest.mark.parametrize(
        ("error", "status", "detail"),
        [
            (Permanent("no engine e9 here"), FAILED, "no engine e9 here"),
            (OutcomeUnknown("connection broke"), UNKNOWN, "connection broke"),
            (KeyError("defect"), UNKNOWN, "a defect ended it: KeyError('defect')"),
        ],
    )
    async def test_errors_become_results(self, error: Exception, status: int, detail: str) -> None:
        handler = Handler()
        handler.error = error
        log = OperationLog("n0", handler, clock=VirtualClock())
        result = await log.run(operation("a"))
        assert (result.status, result.detail) == (status, detail)
        assert await log.run(operation("a")) == result
        assert handler.calls == ["a"]


class Daemon(agent_pb2_grpc.NodeServicer, telemetry_pb2_grpc.TelemetryServicer):
    """Sends the operations it is given to whoever attaches; notes what it hears."""

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
    return NodeLink(f"127.0.0.1:{port}", hello, handler, clock=WallClock(), rng=random.Random(1))


class TestNodeLink:
    async def test_it_waits_for_a_daemon_that_is_not_there_yet(self, port: int) -> None:
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

    async def test_a_restarted_daemon_sees_the_node_again_and_no_operation_runs_twice(self, port: int) -> None:
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

    async def test_a_result_that_could_not_be_sent_goes_out_after_reattaching(self, port: int) -> None:
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

    async def test_a_failing_handler_leaves_the_link_up(self, port: int) -> None:
        handler = Handler()
        handler.error = KeyError("defect")
        node = link(port, handler)
        daemon = Daemon(port, [operation("a"), operation("b")])
        await daemon.start()
        async with running(node.run):
            await eventually(lambda: len(daemon.results) == 2)
            assert {result.status for result in daemon.results} == {UNKNOWN}
            assert len(daemon.hellos) == 1
        await daemon.die()


class TestReportStream:
    async def test_reports_flow_again_after_each_death_and_hang_up(self, port: int) -> None:
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
            rng=random.Random(1),
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
        assert len(opened) >= 5  # three daemons, one of which hung up after each report
        assert acked == sorted(set(acked))

    async def test_a_defect_in_a_report_is_not_the_end(self, port: int) -> None:
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
