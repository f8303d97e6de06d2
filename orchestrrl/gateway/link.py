"""The gateway's connection to the daemon: takes routes and moves from it, reports every request to it.

Without the daemon the gateway goes on by its last orders; nothing here is in the way of a request.
"""

import asyncio

from google.protobuf.message import Message

from orchestrrl import __version__
from orchestrrl.clock import Clock
from orchestrrl.gateway.core import Gateway
from orchestrrl.operations import MoveRequests, Operation, OperationResult, OperationStatus, SetRoutes, status_of
from orchestrrl.reports import NodeHello, NodeKind
from orchestrrl.rpc.convert import ack_from_pb, gateway_report_to_pb, hello_to_pb, operation_from_pb, result_to_pb
from orchestrrl.rpc.node import NodeLink, ReportStream
from orchestrrl.rpc.pb import agent_pb2, telemetry_pb2


class GatewayLink:
    """`run` stays attached and reports each `report_interval_s`, until cancelled."""

    def __init__(self, gateway: Gateway, target: str, *, report_interval_s: float, clock: Clock) -> None:
        self._gateway = gateway
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
            case SetRoutes(routes):
                faults = self._gateway.set_routes(routes)
                status = OperationStatus.PARTIAL if faults else OperationStatus.DONE
                return OperationResult(operation.id, self._gateway.node, status, "; ".join(faults))
            case MoveRequests(moves):
                items = await self._gateway.move(moves)
                return OperationResult(operation.id, self._gateway.node, status_of(items), items=items)
            case other:
                detail = f"{other.kind} is for agents, not for gateways"
                return OperationResult(operation.id, self._gateway.node, OperationStatus.FAILED, detail)

    async def _report(self) -> Message:
        return gateway_report_to_pb(self._gateway.report())

    def _acknowledge(self, message: telemetry_pb2.ReportAck) -> None:
        self._gateway.ledger.acknowledge(ack_from_pb(message).sequence)
