"""What agents and gateways share to talk to the daemon: carry out its operations once per id, and report to it."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown
from orchestrrl.rpc.channel import Backoff, Established, first_of, stay_connected, stop
from orchestrrl.rpc.codecs.telemetry import outside_text
from orchestrrl.rpc.pb import agent_pb2 as pb
from orchestrrl.rpc.pb import agent_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc

logger = logging.getLogger(__name__)

Handler = Callable[[pb.Operation], Awaitable[pb.OperationResult]]


@dataclass(frozen=True, slots=True)
class _Entry:
    task: asyncio.Task[pb.OperationResult]
    valid_until_s: float


class OperationLog:
    """Carries out each operation once per id, however often it is delivered.

    A result is kept at least until its operation has expired, so a late repetition is either answered with it or
    refused as expired, never carried out again. With `capacity` unexpired operations remembered, new ones are refused.
    An operation without an expiry has expired.
    """

    def __init__(self, node_id: str, handler: Handler, *, clock: Clock, capacity: int = 4096) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self._node_id = node_id
        self._handler = handler
        self._clock = clock
        self._capacity = capacity
        self._newest_generation = 0
        self._entries: dict[str, _Entry] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._entries)

    async def run(self, operation: pb.Operation) -> pb.OperationResult:
        """The operation's result: stored, joined, refused with its reason, or obtained from the handler now."""
        entry = self._entries.get(operation.operation_id)
        if entry is None:
            refusal = self._refusal(operation)
            if refusal:
                return self._result(operation, pb.OPERATION_STATUS_REFUSED, refusal)
            entry = _Entry(asyncio.create_task(self._perform(operation)), operation.valid_until_unix_s)
            self._entries[operation.operation_id] = entry
        await asyncio.wait({entry.task})
        return self._outcome(operation, entry.task)

    async def close(self) -> None:
        """Cancel what still runs."""
        await stop(*(entry.task for entry in self._entries.values()))

    def _refusal(self, operation: pb.Operation) -> str:
        """Why the operation must not be carried out; empty when it may."""
        newest = self._newest_generation = max(self._newest_generation, operation.generation)
        if operation.generation < newest:
            return f"generation {operation.generation} is superseded: generation {newest} has given orders since"
        now_s = self._clock.now_s()
        late_s = now_s - operation.valid_until_unix_s
        if late_s > 0:
            return f"expired {late_s:.3g} s ago" if operation.valid_until_unix_s else "carries no expiry"
        self._forget(now_s)
        if len(self._entries) >= self._capacity:
            return f"{len(self._entries)} unexpired operations are remembered already, the limit is {self._capacity}"
        return ""

    def _forget(self, now_s: float) -> None:
        """Make room for one more: drop finished and expired entries, oldest first, and no more than needed."""
        for operation_id in list(self._entries):
            if len(self._entries) < self._capacity:
                return
            entry = self._entries[operation_id]
            if entry.task.done() and entry.valid_until_s < now_s:
                del self._entries[operation_id]

    async def _perform(self, operation: pb.Operation) -> pb.OperationResult:
        started_s = self._clock.now_s()
        try:
            result = await self._handler(operation)
        except OutcomeUnknown as error:
            result = self._result(operation, pb.OPERATION_STATUS_UNKNOWN, str(error))
        except OrchestrRLError as error:
            result = self._result(operation, pb.OPERATION_STATUS_FAILED, str(error))
        result.operation_id = operation.operation_id
        result.node_id = self._node_id
        result.duration_s = self._clock.now_s() - started_s
        return result

    def _outcome(self, operation: pb.Operation, task: asyncio.Task[pb.OperationResult]) -> pb.OperationResult:
        if task.cancelled():
            return self._result(operation, pb.OPERATION_STATUS_UNKNOWN, "the node was shutting down")
        defect = task.exception()
        if defect is None:
            return task.result()
        logger.error("operation %s ended in a defect", operation.operation_id, exc_info=defect)
        return self._result(operation, pb.OPERATION_STATUS_UNKNOWN, f"a defect ended it: {defect!r}")

    def _result(
        self, operation: pb.Operation, status: "pb.OperationStatus.ValueType", detail: str
    ) -> pb.OperationResult:
        return pb.OperationResult(
            operation_id=operation.operation_id, node_id=self._node_id, status=status, detail=outside_text(detail)
        )


class NodeLink:
    """A node's attachment to the daemon: `run()` receives operations and returns results until cancelled.

    Operations run concurrently and outlive a broken stream; results that could not be sent go out after re-attaching.
    The handler may raise our errors; they become FAILED or UNKNOWN results.
    """

    def __init__(
        self,
        target: str,
        hello: pb.NodeHello,
        handler: Handler,
        *,
        clock: Clock,
        rng: random.Random | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._target = target
        self._hello = hello
        self._clock = clock
        self._rng = rng or random.Random()
        self._backoff = backoff or Backoff()
        self._operations = OperationLog(hello.node_id, handler, clock=clock)
        self._running: set[asyncio.Task[None]] = set()
        self._outbox: deque[pb.OperationResult] = deque()
        self._outbox_filled = asyncio.Event()
        self._connected = False

    @property
    def connected(self) -> bool:
        return self._connected

    async def run(self) -> None:
        """Attach, and attach again whenever the daemon went away. Ends only by cancellation."""
        try:
            await stay_connected(
                self._target,
                self._converse,
                clock=self._clock,
                rng=self._rng,
                backoff=self._backoff,
                name=f"{self._hello.node_id} operations",
            )
        finally:
            await stop(*self._running)
            await self._operations.close()

    async def _converse(self, channel: grpc.aio.Channel, established: Established) -> None:
        call = agent_pb2_grpc.NodeStub(channel).Attach()
        try:
            await call.wait_for_connection()
            await call.write(pb.NodeMessage(hello=self._hello))
            self._connected = True
            established()
            logger.info("%s: attached to %s", self._hello.node_id, self._target)
            await first_of(self._receive(call), self._send(call))
        finally:
            self._connected = False
            call.cancel()

    async def _receive(self, call: grpc.aio.StreamStreamCall[pb.NodeMessage, pb.Operation]) -> None:
        async for operation in call:
            task = asyncio.create_task(self._carry_out(operation))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _carry_out(self, operation: pb.Operation) -> None:
        self._outbox.append(await self._operations.run(operation))
        self._outbox_filled.set()

    async def _send(self, call: grpc.aio.StreamStreamCall[pb.NodeMessage, pb.Operation]) -> None:
        while True:
            while self._outbox:
                await call.write(pb.NodeMessage(result=self._outbox[0]))
                self._outbox.popleft()  # only now: a result whose write failed stays for the next stream
            self._outbox_filled.clear()
            await self._outbox_filled.wait()


class ReportStream:
    """A stream of reports to the daemon, one each `interval_s`, until cancelled; reopened whenever it breaks.

    `make_report` is awaited for each report, which is stamped as it is sent; `on_open` is called as a stream begins,
    before its first report; `on_ack` with each acknowledgement.
    """

    def __init__(
        self,
        target: str,
        method_name: Literal["ReportEngines", "ReportRequests"],
        make_report: Callable[[], Awaitable[telemetry_pb2.EngineReport | telemetry_pb2.GatewayReport]],
        interval_s: float,
        *,
        clock: Clock,
        on_ack: Callable[[telemetry_pb2.ReportAck], None] | None = None,
        on_open: Callable[[], None] | None = None,
        rng: random.Random | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._target = target
        self._method_name = method_name
        self._make_report = make_report
        self._interval_s = interval_s
        self._clock = clock
        self._on_ack = on_ack
        self._on_open = on_open
        self._rng = rng or random.Random()
        self._backoff = backoff or Backoff()
        self._connected = False
        self._acked = 0.0, 0.0  # the daemon's time in its latest acknowledgement, and when that arrived

    @property
    def connected(self) -> bool:
        return self._connected

    async def run(self) -> None:
        """Report, and open the stream again whenever the daemon went away. Ends only by cancellation."""
        await stay_connected(
            self._target,
            self._converse,
            clock=self._clock,
            rng=self._rng,
            backoff=self._backoff,
            name=self._method_name,
        )

    async def _converse(self, channel: grpc.aio.Channel, established: Established) -> None:
        call = getattr(telemetry_pb2_grpc.TelemetryStub(channel), self._method_name)()
        try:
            await call.wait_for_connection()
            self._connected = True
            established()
            if self._on_open:
                self._on_open()
            self._acked = 0.0, 0.0  # what an earlier daemon sent is by its clock
            await first_of(self._receive(call), self._send(call))
        finally:
            self._connected = False
            call.cancel()

    async def _receive(self, call: grpc.aio.StreamStreamCall[Any, telemetry_pb2.ReportAck]) -> None:
        async for ack in call:
            if ack.sent_unix_s:
                self._acked = ack.sent_unix_s, self._clock.now_s()
            if self._on_ack:
                self._on_ack(ack)

    async def _send(self, call: grpc.aio.StreamStreamCall[Any, telemetry_pb2.ReportAck]) -> None:
        while True:
            report = await self._make_report()
            report.sent_unix_s = self._clock.now_s()
            if self._acked[0]:
                report.ack_sent_unix_s, report.ack_received_unix_s = self._acked
            await call.write(report)
            await self._clock.sleep(self._interval_s)
