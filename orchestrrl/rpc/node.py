"""The client with which agents and gateways attach to the daemon. It carries out each of the daemon's operations once
and sends reports to the daemon."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal

import grpc

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.delivery import NotDone, Outbox, ReceivedOrders
from orchestrrl.core.operations import Operation, OperationId, OperationResult, OperationStatus
from orchestrrl.rpc.channel import Established, first_of, stay_connected
from orchestrrl.rpc.codecs.node import OPERATION, RESULT
from orchestrrl.rpc.pb import agent_pb2 as pb
from orchestrrl.rpc.pb import agent_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from planner.model import NodeId

logger = logging.getLogger(__name__)

Perform = Callable[[Operation], Awaitable[OperationResult]]

REMEMBERED = 4096  # stored operations and their results


class NodeLink:
    """A node's attachment to the daemon. `run()` receives operations and sends their results until cancelled.

    Operations run concurrently, and continue when the stream breaks. Results that could not be sent are sent after the
    next attachment. OrchestrRLErrors raised by `perform` become FAILED or UNKNOWN results.
    """

    def __init__(
        self,
        target: str,
        hello: pb.NodeHello,
        perform: Perform,
        *,
        clock: Clock,
    ) -> None:
        self._target = target
        self._hello = hello
        self._node = NodeId(hello.node_id)
        self._clock = clock
        self._perform = perform
        self._operations = ReceivedOrders(self._carry_out, self._not_done, clock, REMEMBERED)
        self._running: set[asyncio.Task[None]] = set()
        self._outbox: Outbox[pb.NodeMessage] = Outbox()
        self.connected = False

    async def run(self) -> None:
        """Attach to the daemon, and attach again whenever the daemon disconnects. The call ends only by
        cancellation."""
        try:
            name = f"{self._hello.node_id} operations"
            await stay_connected(self._target, self._converse, clock=self._clock, name=name)
        finally:
            await stop(*self._running)
            await self._operations.close()

    async def _converse(self, channel: grpc.aio.Channel, established: Established) -> None:
        call = agent_pb2_grpc.NodeStub(channel).Attach()
        try:
            await call.wait_for_connection()
            await call.write(pb.NodeMessage(hello=self._hello))
            self.connected = True
            established()
            logger.info("%s: attached to %s", self._hello.node_id, self._target)
            await first_of(self._receive(call), self._outbox.write_all(call.write))
        finally:
            self.connected = False
            call.cancel()

    async def _receive(self, call: grpc.aio.StreamStreamCall[pb.NodeMessage, pb.Operation]) -> None:
        async for operation in call:
            task = asyncio.create_task(self._answer(operation))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _answer(self, message: pb.Operation) -> None:
        try:
            operation = OPERATION.from_pb(message)
        except ValueError as error:
            detail = f"invalid operation: {error}"
            result = OperationResult(OperationId(message.operation_id), self._node, OperationStatus.FAILED, detail)
        else:
            result = await self._operations.result(operation)
        self._outbox.put(pb.NodeMessage(result=RESULT.to_pb(result)))

    async def _carry_out(self, operation: Operation) -> OperationResult:
        began_s = self._clock.now_s()
        result = await self._perform(operation)
        return replace(result, duration_s=self._clock.now_s() - began_s)

    def _not_done(self, operation: Operation, why: NotDone, detail: str, began_s: float) -> OperationResult:
        return OperationResult(
            operation.id, self._node, OperationStatus(why), detail, duration_s=self._clock.now_s() - began_s
        )


class ReportStream:
    """A stream that sends a report to the daemon every `interval_s` seconds until cancelled. The stream is reopened
    whenever it breaks.

    `make_report` is awaited for each report, which gets a timestamp when it is sent. `on_open` is called when a stream
    begins, before its first report. `on_ack` is called with each acknowledgement.
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
    ) -> None:
        self._target = target
        self._method_name = method_name
        self._make_report = make_report
        self._interval_s = interval_s
        self._clock = clock
        self._on_ack = on_ack
        self._on_open = on_open
        self.connected = False
        self._acked = 0.0, 0.0  # the daemon's time in its latest acknowledgement, and the time of its arrival

    async def run(self) -> None:
        """Send reports, and reopen the stream whenever the daemon disconnects. The call ends only by cancellation."""
        await stay_connected(self._target, self._converse, clock=self._clock, name=self._method_name)

    async def _converse(self, channel: grpc.aio.Channel, established: Established) -> None:
        call = getattr(telemetry_pb2_grpc.TelemetryStub(channel), self._method_name)()
        try:
            await call.wait_for_connection()
            self.connected = True
            established()
            if self._on_open:
                self._on_open()
            self._acked = 0.0, 0.0  # an earlier daemon's time is by another clock
            await first_of(self._receive(call), self._send(call))
        finally:
            self.connected = False
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
