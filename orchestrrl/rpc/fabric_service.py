"""The Fabric service. Agents use it to report slack windows, trainers to announce periods, and operators to inspect,
pin and mask circuits."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import grpc

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.daemon.wiring import FabricParts
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.window_tracker import AgentStream, WindowTracker
from orchestrrl.rpc.codecs.fabric import (
    CONTROL,
    PERIOD,
    QUIET,
    VERIFICATION,
    fabric_to_pb,
    hosts_to_pb,
    jobs_from_pb,
    order_to_pb,
)
from orchestrrl.rpc.pb import fabric_pb2 as pb
from orchestrrl.rpc.pb import fabric_pb2_grpc
from orchestrrl.rpc.refusals import Context, status_text
from planner.fabric.clocks import ClockExchange
from planner.model import Hold

logger = logging.getLogger(__name__)

NO_FABRIC = "no optical fabric is configured: set fabric.site in the daemon's configuration"


class FabricService(fabric_pb2_grpc.FabricServicer):
    """The servicer of the Fabric service. Agents report slack windows even if no fabric is configured, so that
    `orchestrrl fabric slack` can display them."""

    def __init__(self, fabric: FabricParts, hub: WindowTracker, clock: Clock) -> None:
        self._fabric = fabric
        self._hub = hub
        self._now_s = clock.now_s

    async def Trace(
        self, request_iterator: AsyncIterator[pb.TraceMessage], context: Context
    ) -> AsyncIterator[pb.TraceOrder]:
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        if not first.HasField("hello") or not first.hello.host:
            raise ProblemFaults(
                [
                    f"the first message must be a hello with the host's name, got {first.WhichOneof('message')}"
                    f" with host {first.hello.host!r}"
                ]
            )
        stream = self._hub.attach(first.hello.host, jobs_from_pb(first.hello))
        tasks = (asyncio.ensure_future(self._receive(request_iterator, stream)), asyncio.ensure_future(stream.ping()))
        try:
            while (order := await stream.next_order()) is not None:
                yield order_to_pb(order)
            if tasks[0].done():
                tasks[0].result()  # its error ends the call
        finally:
            await stop(*tasks)
            stream.end()

    async def _receive(self, messages: AsyncIterator[pb.TraceMessage], stream: AgentStream) -> None:
        try:
            async for message in messages:
                try:
                    self._take(message, stream)
                except (ValueError, RecursionError) as error:
                    logger.warning("invalid message from an agent: %s", error)
        finally:
            stream.end()

    def _take(self, message: pb.TraceMessage, stream: AgentStream) -> None:
        match message.WhichOneof("message"):
            case "hello":
                stream.traces(jobs_from_pb(message.hello))
            case "quiet":
                quiet = message.quiet
                stream.on_remaining_quiet(quiet.job, quiet.told_s, quiet.rank, QUIET.from_pb(quiet))
            case "traffic":
                traffic = message.traffic
                stream.on_remaining_quiet(traffic.job, traffic.at_s, -1, Hold(traffic.code, traffic.detail))
            case "pong":
                pong = message.pong
                stream.answers(ClockExchange(pong.sent_s, pong.received_s, pong.answered_s, self._now_s()))
            case "slack":
                json.loads(message.slack.summary_json, parse_constant=_no_number)
                stream.on_slack(message.slack.summary_json)
            case "announcement":
                self._announced(message.announcement)

    async def AnnouncePeriod(
        self, request: pb.AnnouncePeriodRequest, context: Context
    ) -> AsyncIterator[pb.PeriodReport]:
        fabric = self._coordinator()
        try:
            period = fabric.announce(
                request.period, request.intent_json, request.within_s, boundary=request.boundary, job=request.job
            )
        except Permanent as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, status_text(error))
        try:
            async for report in period.follow():
                yield PERIOD.to_pb(report)
        finally:
            if request.boundary:  # harmless if it has ended
                fabric.withdraw(period, "the caller disconnected and may no longer be idle")

    async def GetFabric(self, request: pb.GetFabricRequest, context: Context) -> pb.FabricStatus:
        if self._fabric.coordinator is None:
            return pb.FabricStatus(configured=False, hosts=hosts_to_pb(self._hub, self._now_s()))
        message = fabric_to_pb(self._fabric.coordinator, request.limit, self._fabric.routing)
        message.hosts.extend(hosts_to_pb(self._hub, self._now_s()))
        return message

    async def GetSlack(self, request: pb.GetSlackRequest, context: Context) -> pb.SlackStatus:
        return pb.SlackStatus(summary_json=await self._hub.slack_json())

    async def PinFabric(self, request: pb.PinFabricRequest, context: Context) -> pb.FabricControl:
        overrides = self._coordinator().overrides
        return CONTROL.to_pb(overrides.pin(request.cross_connects, request.reason, request.ttl_s))

    async def OverrideFabric(self, request: pb.OverrideFabricRequest, context: Context) -> pb.FabricControl:
        fabric = self._coordinator()
        return CONTROL.to_pb(fabric.override(request.period, request.reason, request.ttl_s, request.job))

    async def ReleaseFabric(self, request: pb.ReleaseFabricRequest, context: Context) -> pb.FabricControl:
        return CONTROL.to_pb(self._coordinator().overrides.release(request.reason))

    async def MaskFabric(self, request: pb.MaskFabricRequest, context: Context) -> pb.FabricStatus:
        fabric = self._coordinator()
        fabric.mask(request.masked, request.reason)
        return fabric_to_pb(fabric, 0)

    async def VerifyFabric(self, request: pb.VerifyFabricRequest, context: Context) -> pb.FabricVerification:
        if self._fabric.verifier is None:
            raise Permanent(NO_FABRIC)
        return VERIFICATION.to_pb(await self._fabric.verifier.verify(request.walk))

    def _announced(self, message: pb.Announcement) -> None:
        """Accept the announcement of a period from a traced process. The process receives no response, so an invalid
        announcement is only logged."""
        if self._fabric.coordinator is None:
            return
        try:
            self._fabric.coordinator.announce(message.period, message.intent_json, job=message.job)
        except OrchestrRLError as error:
            logger.warning("invalid period announced by rank %d: %s", message.rank, error)

    def _coordinator(self) -> CircuitCoordinator:
        if self._fabric.coordinator is None:
            raise Permanent(NO_FABRIC)
        return self._fabric.coordinator


def _no_number(constant: str) -> None:
    """Raise ValueError for NaN and infinities, which Python's parser accepts although JSON does not have them."""
    raise ValueError(f"summary_json: numbers must be finite, got {constant}")
