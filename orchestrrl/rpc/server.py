"""The daemon's gRPC server. It offers every service of proto/, health checks and reflection, on TCP and a Unix socket.

The servicers only translate messages. The control plane carries out the requests.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from orchestrrl.core.config.schema import ListenSettings
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.nodes import Attachment
from orchestrrl.daemon.fleet_coordinator import FleetCoordinator
from orchestrrl.daemon.wiring import Daemon
from orchestrrl.rpc.boundary import BoundaryInterceptor
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.codecs import node as node_codec
from orchestrrl.rpc.codecs import telemetry as telemetry_codec
from orchestrrl.rpc.control_service import ControlService
from orchestrrl.rpc.fabric_service import FabricService
from orchestrrl.rpc.pb import (
    agent_pb2,
    agent_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    fabric_pb2,
    fabric_pb2_grpc,
    telemetry_pb2,
    telemetry_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from orchestrrl.rpc.ranges import STEP_ITEMS
from orchestrrl.rpc.refusals import Context, read
from orchestrrl.rpc.weights_service import WeightsService

_Message = TypeVar("_Message")
_Value = TypeVar("_Value")

MOST_RECEIVED_BYTES = 2**31 - 1  # the largest value that gRPC accepts

SERVICES = tuple(
    service.full_name
    for module in (control_pb2, fabric_pb2, telemetry_pb2, agent_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    def __init__(self, fleet: FleetCoordinator) -> None:
        self._fleet = fleet
        self._streams = itertools.count(1)

    async def ReportEngines(
        self, request_iterator: AsyncIterator[telemetry_pb2.EngineReport], context: Context
    ) -> AsyncIterator[telemetry_pb2.ReportAck]:
        stream = next(self._streams)
        try:
            async for message in request_iterator:
                report = await read(context, message, telemetry_codec.ENGINE_REPORT.from_pb)
                yield telemetry_codec.ACK.to_pb(self._fleet.engine_reported(report, stream))
        finally:
            self._fleet.stream_ended(stream)

    async def ReportRequests(
        self, request_iterator: AsyncIterator[telemetry_pb2.GatewayReport], context: Context
    ) -> AsyncIterator[telemetry_pb2.ReportAck]:
        stream = next(self._streams)
        try:
            async for message in request_iterator:
                in_flight = await _in_steps(telemetry_codec.REQUEST.from_pb, message.in_flight)
                finished = await _in_steps(telemetry_codec.FINISHED.from_pb, message.finished)
                message.ClearField("in_flight")
                message.ClearField("finished")
                report = await read(context, message, telemetry_codec.GATEWAY_REPORT.from_pb)
                report = replace(report, in_flight=in_flight, finished=finished)
                yield telemetry_codec.ACK.to_pb(self._fleet.gateway_reported(report, stream))
        finally:
            self._fleet.stream_ended(stream)


async def _in_steps(convert: Callable[[_Message], _Value], messages: Sequence[_Message]) -> tuple[_Value, ...]:
    """Convert messages with `convert` and return the values. The work is done in steps, so that other calls can
    continue between the steps."""
    values: list[_Value] = []
    for first in range(0, len(messages), STEP_ITEMS):
        if first:
            await asyncio.sleep(0)
        values += map(convert, messages[first : first + STEP_ITEMS])
    return tuple(values)


class NodeService(agent_pb2_grpc.NodeServicer):
    def __init__(self, fleet: FleetCoordinator) -> None:
        self._fleet = fleet

    async def Attach(
        self, request_iterator: AsyncIterator[agent_pb2.NodeMessage], context: Context
    ) -> AsyncIterator[agent_pb2.Operation]:
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        if not first.HasField("hello"):
            raise ProblemFaults([f"the first message must be a hello, got {first.WhichOneof('message')}"])
        hello = await read(context, first.hello, node_codec.HELLO.from_pb)
        attachment = self._fleet.attach(hello)
        results = asyncio.create_task(self._receive(request_iterator, attachment))
        try:
            async for operation in attachment.orders():
                yield node_codec.OPERATION.to_pb(operation)
            if results.done():
                results.result()  # its error ends the call
        finally:
            results.cancel()
            self._fleet.detach(attachment)

    async def _receive(self, messages: AsyncIterator[agent_pb2.NodeMessage], attachment: Attachment) -> None:
        try:
            async for message in messages:
                if message.HasField("result"):
                    result = node_codec.RESULT.from_pb(message.result)
                    self._fleet.result_received(replace(result, node=attachment.hello.node))
        finally:
            attachment.end()


class DaemonServer:
    """The daemon's running gRPC server. `address` contains the actual port if the configured port is 0."""

    def __init__(self, server: grpc.aio.Server, status: "health.aio.HealthServicer", address: str) -> None:
        self._server = server
        self._status = status
        self.address = address

    @classmethod
    async def start(
        cls, daemon: Daemon, listen: ListenSettings, switches: control_pb2_grpc.SwitchesServicer
    ) -> "DaemonServer":
        """Bind the configured addresses, start to serve, and return the server. Raises Permanent if an address cannot
        be bound."""
        fleet, weights, clock = daemon.fleet, daemon.weights, daemon.fleet.clock
        # Otherwise Linux lets two daemons share a port, and each would receive some of the nodes.
        limits = fleet.config.limits
        options = {
            **dict(SERVER_OPTIONS),
            "grpc.so_reuseport": 0,
            "grpc.max_allowed_incoming_connections": limits.connections,
            # Beyond this size gRPC itself refuses a message, without naming the setting.
            "grpc.max_receive_message_length": min(2 * limits.message_bytes, MOST_RECEIVED_BYTES),
        }
        server = grpc.aio.server(options=[*options.items()], interceptors=(BoundaryInterceptor(limits, fleet.defects),))
        status = health.aio.HealthServicer()
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(daemon), server)
        control_pb2_grpc.add_SwitchesServicer_to_server(switches, server)
        fabric_pb2_grpc.add_FabricServicer_to_server(FabricService(daemon.fabric, daemon.windows, clock), server)
        telemetry_pb2_grpc.add_TelemetryServicer_to_server(TelemetryService(fleet), server)
        agent_pb2_grpc.add_NodeServicer_to_server(NodeService(fleet), server)
        weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(weights.syncs, weights.hub, clock), server)
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
        """Announce the shutdown, let calls end within `grace_s`, then cancel the remaining calls."""
        await self._status.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError:
        raise Permanent(
            f"cannot listen on {address}: it is in use, or this user lacks permission; choose another address"
        ) from None
