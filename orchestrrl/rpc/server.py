"""The daemon's gRPC side: Control, Telemetry, Node, Switches, health and reflection, on TCP and a Unix socket.

The servicers translate and nothing more; what is asked is answered by the control plane.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from orchestrrl import __version__
from orchestrrl.config import Listen
from orchestrrl.control_plane import ControlPlane
from orchestrrl.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.nodes import Attachment
from orchestrrl.rpc import convert, convert_control, convert_node
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.pb import (
    agent_pb2,
    agent_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    telemetry_pb2,
    telemetry_pb2_grpc,
)
from planner.model import ConfigurationId, EngineId, PlanId, RequestId

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_Message = TypeVar("_Message")
_Value = TypeVar("_Value")

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (control_pb2, "Control"),
        (control_pb2, "Switches"),
        (telemetry_pb2, "Telemetry"),
        (agent_pb2, "Node"),
    )
)


async def _refuse(context: Context, error: OrchestrRLError | ValueError) -> NoReturn:
    """End the call with the status that says what to do next."""
    code = grpc.StatusCode.UNKNOWN
    match error:
        case ProblemFaults() | ValueError():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case Permanent():
            code = grpc.StatusCode.FAILED_PRECONDITION
        case Retryable():
            code = grpc.StatusCode.ABORTED
        case OutcomeUnknown():
            code = grpc.StatusCode.DEADLINE_EXCEEDED
    await context.abort(code, str(error))


@asynccontextmanager
async def _refusing(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except OrchestrRLError as error:
        await _refuse(context, error)


async def _read(context: Context, message: _Message, read: Callable[[_Message], _Value]) -> _Value:
    try:
        return read(message)
    except ValueError as error:
        await _refuse(context, error)


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._streams = itertools.count(1)

    async def ReportEngines(
        self, request_iterator: AsyncIterator[telemetry_pb2.EngineReport], context: Context
    ) -> AsyncIterator[telemetry_pb2.ReportAck]:
        stream = next(self._streams)
        await context.send_initial_metadata(())  # tells the client that it is connected
        async for message in request_iterator:
            report = await _read(context, message, convert.engine_report_from_pb)
            yield convert.ack_to_pb(self._plane.engine_reported(report, stream))

    async def ReportRequests(
        self, request_iterator: AsyncIterator[telemetry_pb2.GatewayReport], context: Context
    ) -> AsyncIterator[telemetry_pb2.ReportAck]:
        stream = next(self._streams)
        await context.send_initial_metadata(())
        async for message in request_iterator:
            report = await _read(context, message, convert.gateway_report_from_pb)
            yield convert.ack_to_pb(self._plane.gateway_reported(report, stream))


class NodeService(agent_pb2_grpc.NodeServicer):
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def Attach(
        self, request_iterator: AsyncIterator[agent_pb2.NodeMessage], context: Context
    ) -> AsyncIterator[agent_pb2.Operation]:
        await context.send_initial_metadata(())
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        if not first.HasField("hello"):
            await _refuse(context, ValueError("the first message must be a hello"))
        hello = await _read(context, first.hello, convert_node.hello_from_pb)
        attachment = self._plane.attach(hello)
        results = asyncio.create_task(self._receive(request_iterator, attachment))
        try:
            async for operation in attachment.orders():
                yield convert_node.operation_to_pb(operation)
        finally:
            results.cancel()
            self._plane.detach(attachment)

    async def _receive(self, messages: AsyncIterator[agent_pb2.NodeMessage], attachment: Attachment) -> None:
        try:
            async for message in messages:
                if message.HasField("result"):
                    self._plane.result_received(convert_node.result_from_pb(message.result))
        except ValueError as error:
            logger.warning("%s sent a result that makes no sense: %s", attachment.hello.node, error)
        finally:
            attachment.end()


class ControlService(control_pb2_grpc.ControlServicer):
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def GetStatus(self, request: control_pb2.GetStatusRequest, context: Context) -> control_pb2.Status:
        return convert_control.status_to_pb(self._plane, __version__)

    async def ListWorkers(
        self, request: control_pb2.ListWorkersRequest, context: Context
    ) -> control_pb2.ListWorkersResponse:
        snapshot = self._plane.state.snapshot(self._plane.clock.now_s())
        return control_pb2.ListWorkersResponse(workers=convert_control.workers_to_pb(self._plane, snapshot))

    async def ListRequests(
        self, request: control_pb2.ListRequestsRequest, context: Context
    ) -> control_pb2.ListRequestsResponse:
        requests = self._plane.state.snapshot(self._plane.clock.now_s()).requests
        found = [view for view in requests if not request.engine_id or view.engine == request.engine_id]
        listed = found[: request.limit] if request.limit else found
        return control_pb2.ListRequestsResponse(
            requests=[convert.request_to_pb(view) for view in listed], total=len(found)
        )

    async def GetPlan(self, request: control_pb2.GetPlanRequest, context: Context) -> control_pb2.Plan:
        if not request.plan_id and self._plane.plans.latest is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no plan has been made yet")
        try:
            plan = self._plane.plans.get(PlanId(request.plan_id)) if request.plan_id else self._plane.plans.latest
        except Permanent as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        assert plan is not None
        return convert_control.plan_to_pb(plan)

    async def ListPlans(self, request: control_pb2.ListPlansRequest, context: Context) -> control_pb2.ListPlansResponse:
        plans = self._plane.plans.newest(request.limit)
        return control_pb2.ListPlansResponse(plans=[convert_control.plan_to_pb(plan) for plan in plans])

    async def WatchPlans(
        self, request: control_pb2.WatchPlansRequest, context: Context
    ) -> AsyncIterator[control_pb2.PlanEvent]:
        await context.send_initial_metadata(())
        async for event in self._plane.plans.watch():
            yield convert_control.plan_event_to_pb(event)

    async def OverridePlan(self, request: control_pb2.OverridePlanRequest, context: Context) -> control_pb2.PlanControl:
        known = [configuration.id for configuration in self._plane.config.fleet.configuration_values()]
        async with _refusing(context):
            wanted = ConfigurationId(request.configuration)
            control = self._plane.plans.override(wanted, known, request.reason, request.ttl_s)
        return convert_control.control_to_pb(control)

    async def PinPlan(self, request: control_pb2.PinPlanRequest, context: Context) -> control_pb2.PlanControl:
        async with _refusing(context):
            control = self._plane.plans.pin(request.reason, request.ttl_s)
        return convert_control.control_to_pb(control)

    async def ReleasePlan(self, request: control_pb2.ReleasePlanRequest, context: Context) -> control_pb2.PlanControl:
        async with _refusing(context):
            control = self._plane.plans.release(request.reason)
        return convert_control.control_to_pb(control)

    async def GetBalance(self, request: control_pb2.GetBalanceRequest, context: Context) -> control_pb2.Balance:
        if self._plane.balance is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the fast loop has not decided anything yet")
        return convert_control.balance_to_pb(self._plane.balance, self._plane.latest_moves)

    async def SetMode(self, request: control_pb2.SetModeRequest, context: Context) -> control_pb2.SetModeResponse:
        mode = await _read(context, request.mode, convert_control.mode_from_pb)
        async with _refusing(context):
            previous = self._plane.set_mode(mode, request.reason)
        return control_pb2.SetModeResponse(
            mode=convert_control.mode_to_pb(mode), previous=convert_control.mode_to_pb(previous)
        )

    async def MoveRequest(
        self, request: control_pb2.MoveRequestRequest, context: Context
    ) -> control_pb2.MoveRequestResponse:
        async with _refusing(context):
            outcome = await self._plane.move(RequestId(request.request_id), EngineId(request.to_engine_id))
        item = outcome.items[0]
        operation = outcome.operations[0].operation if outcome.operations else ""
        return control_pb2.MoveRequestResponse(done=item.done, detail=item.detail, operation_id=operation)

    async def WatchJournal(
        self, request: control_pb2.WatchJournalRequest, context: Context
    ) -> AsyncIterator[control_pb2.JournalEntry]:
        await context.send_initial_metadata(())
        journal, kinds = self._plane.journal, tuple(request.kinds)
        last = journal.last_sequence
        for entry in journal.tail(request.tail, kinds):
            yield convert_control.entry_to_pb(entry)
        if request.follow:
            async for entry in journal.follow(last, kinds):
                yield convert_control.entry_to_pb(entry)


class Server:
    """The bound server. `address` has the port that was taken where the configured one was 0."""

    def __init__(self, server: grpc.aio.Server, status: "health.aio.HealthServicer", address: str) -> None:
        self._server = server
        self._status = status
        self.address = address

    @classmethod
    async def start(cls, plane: ControlPlane, listen: Listen, switches: control_pb2_grpc.SwitchesServicer) -> "Server":
        """Bind and serve. Raises Permanent when the address or the socket is taken."""
        # Without this, Linux lets two daemons share a port, and each gets some of the nodes.
        server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.so_reuseport", 0)])
        status = health.aio.HealthServicer()
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(plane), server)
        control_pb2_grpc.add_SwitchesServicer_to_server(switches, server)
        telemetry_pb2_grpc.add_TelemetryServicer_to_server(TelemetryService(plane), server)
        agent_pb2_grpc.add_NodeServicer_to_server(NodeService(plane), server)
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        for name in names:
            await status.set(name, health_pb2.HealthCheckResponse.SERVING)
        port = _bind(server, listen.address)
        if listen.socket is not None:
            _bind(server, f"unix:{listen.socket}")
        await server.start()
        if listen.socket is not None:
            os.chmod(listen.socket, 0o600)
        return cls(server, status, f"{listen.address.rpartition(':')[0]}:{port}")

    async def stop(self, grace_s: float) -> None:
        """Say that the service ends, let calls end within `grace_s`, then end them."""
        await self._status.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError:
        raise Permanent(f"cannot listen on {address}: it is in use, or may not be used by this user") from None
