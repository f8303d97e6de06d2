"""The gateway's connection to the daemon: takes routes and moves from it, reports every request to it.

Without the daemon the gateway goes on by its last orders; nothing here is in the way of a request.
"""

import asyncio

import grpc
from google.protobuf.message import Message

from orchestrrl import __version__
from orchestrrl.clock import Clock
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.expected import Expected
from orchestrrl.operations import (
    CancelRequests,
    CloseGate,
    ItemResult,
    MoveRequests,
    OpenGate,
    Operation,
    OperationResult,
    OperationStatus,
    SetRoutes,
    status_of,
)
from orchestrrl.reports import NodeHello, NodeKind
from orchestrrl.rpc.channel import CHANNEL_OPTIONS
from orchestrrl.rpc.convert import ack_from_pb, gateway_report_to_pb
from orchestrrl.rpc.convert_node import hello_to_pb, operation_from_pb, result_to_pb
from orchestrrl.rpc.node import NodeLink, ReportStream
from orchestrrl.rpc.pb import agent_pb2, control_pb2, control_pb2_grpc, telemetry_pb2
from planner.model import EngineId, RequestId

MOVE_ANSWER_S = 30.0  # of the daemon, which waits for the gateway that has the request


class GatewayLink:
    """`run` stays attached and reports each `report_interval_s`, until cancelled."""

    def __init__(self, gateway: Gateway, target: str, *, report_interval_s: float, clock: Clock) -> None:
        self._gateway = gateway
        self._target = target
        hello = NodeHello(
            node=gateway.node,
            kind=NodeKind.GATEWAY,
            engines=tuple(slot.id for slot in gateway.fleet),
            version=__version__,
            url=gateway.url,
        )
        self._node = NodeLink(target, hello_to_pb(hello), self._handle, clock=clock)
        self._reports = ReportStream(
            target, "ReportRequests", self._report, report_interval_s, clock=clock, on_ack=self._acknowledge
        )

    async def run(self) -> None:
        await asyncio.gather(self._node.run(), self._reports.run())

    async def _handle(self, message: agent_pb2.Operation) -> agent_pb2.OperationResult:
        try:
            operation = operation_from_pb(message)
        except ValueError as error:
            return agent_pb2.OperationResult(status=agent_pb2.OPERATION_STATUS_FAILED, detail=str(error))
        return result_to_pb(await self.perform(operation))

    async def perform(self, operation: Operation) -> OperationResult:
        """Carry out one operation of the daemon."""
        match operation.action:
            case SetRoutes(routes, expected, expected_until_s):
                faults = self._gateway.set_routes(routes, Expected(frozenset(expected), expected_until_s))
                status = OperationStatus.PARTIAL if faults else OperationStatus.DONE
                return OperationResult(operation.id, self._gateway.node, status, "; ".join(faults))
            case MoveRequests(moves):
                items = await self._gateway.move(moves)
                return OperationResult(operation.id, self._gateway.node, status_of(items), items=items)
            case CloseGate() as order:
                items = await self._gateway.gate.close(order)
                return OperationResult(operation.id, self._gateway.node, status_of(items), items=items)
            case OpenGate() as order:
                items = await self._gateway.gate.open(order)
                return OperationResult(operation.id, self._gateway.node, status_of(items), items=items)
            case CancelRequests(requests, groups, reason):
                cancelled = self._gateway.cancel(requests, groups, reason)
                items = tuple(ItemResult(name, True) for name in cancelled)
                return OperationResult(operation.id, self._gateway.node, OperationStatus.DONE, items=items)
            case other:
                detail = f"{other.kind} is for agents, not for gateways"
                return OperationResult(operation.id, self._gateway.node, OperationStatus.FAILED, detail)

    async def move_elsewhere(self, request: RequestId, to_engine: EngineId) -> ItemResult:
        """Have the daemon move a request that another gateway holds."""
        asked = control_pb2.MoveRequestRequest(request_id=request, to_engine_id=to_engine)
        try:
            async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                answer = await stub.MoveRequest(asked, timeout=MOVE_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            return ItemResult(request, False, f"is not here, and the daemon says: {error.details()}")
        return ItemResult(request, answer.done, answer.detail)

    async def _report(self) -> Message:
        return gateway_report_to_pb(self._gateway.report())

    def _acknowledge(self, message: telemetry_pb2.ReportAck) -> None:
        self._gateway.ledger.acknowledge(ack_from_pb(message).sequence)
