"""The service Fabric: agents tell of windows; trainers announce periods; operators look, pin and mask."""

import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from orchestrrl.clock import Clock
from orchestrrl.errors import OrchestrRLError, Permanent
from orchestrrl.execute.fabric_windows import TraceHub
from orchestrrl.rpc.convert_fabric import control_of_fabric_to_pb, fabric_to_pb, hosts_to_pb, period_to_pb
from orchestrrl.rpc.pb import fabric_pb2 as pb
from orchestrrl.rpc.pb import fabric_pb2_grpc
from orchestrrl.rpc.refusals import Context, refuse, refusing

if TYPE_CHECKING:
    from orchestrrl.execute.fabric import Coordinator

logger = logging.getLogger(__name__)

NO_FABRIC = "there is no optical fabric here: name its site in fabric.site of the daemon's configuration"


class FabricService(fabric_pb2_grpc.FabricServicer):
    """Agents tell of windows whether there is a fabric or not: `orchestrrl fabric slack` shows them all the same."""

    def __init__(self, fabric: "Coordinator | None", hub: TraceHub, clock: Clock) -> None:
        self._fabric = fabric
        self._hub = hub
        self._now_s = clock.now_s

    async def Trace(
        self, request_iterator: AsyncIterator[pb.TraceMessage], context: Context
    ) -> AsyncIterator[pb.TraceOrder]:
        await context.send_initial_metadata(())
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        if not first.HasField("hello") or not first.hello.host:
            await refuse(context, ValueError("the first message must be a hello with the host's name"))
        async for order in self._hub.converse(first.hello, request_iterator, self._announced):
            yield order

    async def AnnouncePeriod(
        self, request: pb.AnnouncePeriodRequest, context: Context
    ) -> AsyncIterator[pb.PeriodReport]:
        await context.send_initial_metadata(())
        fabric = await self._coordinator(context)
        try:
            period = fabric.announce(request.period, request.intent_json, request.within_s, boundary=request.boundary)
        except Permanent as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except OrchestrRLError as error:
            await refuse(context, error)
        async for report in fabric.follow(period):
            message = period_to_pb(report)
            assert message is not None
            yield message

    async def GetFabric(self, request: pb.GetFabricRequest, context: Context) -> pb.FabricStatus:
        if self._fabric is None:
            return pb.FabricStatus(configured=False, hosts=hosts_to_pb(self._hub, self._now_s()))
        message = fabric_to_pb(self._fabric, request.limit)
        message.hosts.extend(hosts_to_pb(self._hub, self._now_s()))
        return message

    async def GetSlack(self, request: pb.GetSlackRequest, context: Context) -> pb.SlackStatus:
        return pb.SlackStatus(summary_json=self._hub.slack_json())

    async def PinFabric(self, request: pb.PinFabricRequest, context: Context) -> pb.FabricControl:
        fabric = await self._coordinator(context)
        async with refusing(context):
            control = fabric.word.pin(request.cross_connects, request.reason, request.ttl_s)
        return control_of_fabric_to_pb(control)

    async def OverrideFabric(self, request: pb.OverrideFabricRequest, context: Context) -> pb.FabricControl:
        fabric = await self._coordinator(context)
        async with refusing(context):
            control = fabric.override(request.period, request.reason, request.ttl_s)
        return control_of_fabric_to_pb(control)

    async def ReleaseFabric(self, request: pb.ReleaseFabricRequest, context: Context) -> pb.FabricControl:
        fabric = await self._coordinator(context)
        async with refusing(context):
            control = fabric.word.release(request.reason)
        return control_of_fabric_to_pb(control)

    async def MaskFabric(self, request: pb.MaskFabricRequest, context: Context) -> pb.FabricStatus:
        fabric = await self._coordinator(context)
        async with refusing(context):
            fabric.mask(request.masked, request.reason)
        return fabric_to_pb(fabric, 0)

    def _announced(self, message: pb.Announcement) -> None:
        """By a traced process, which waits for no answer."""
        if self._fabric is None:
            return
        try:
            self._fabric.announce(message.period, message.intent_json)
        except OrchestrRLError as error:
            logger.warning("rank %d announced a period that makes no sense: %s", message.rank, error)

    async def _coordinator(self, context: Context) -> "Coordinator":
        if self._fabric is None:
            await refuse(context, Permanent(NO_FABRIC))
        return self._fabric
