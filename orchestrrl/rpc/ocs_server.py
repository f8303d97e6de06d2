"""Serve any driver through the gRPC service `OcsDriver`, so that a separate process can drive a device."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from ocs_drivers.base import OcsDriver
from ocs_drivers.errors import CircuitConflict, DriverError, DriverOutcomeUnknown, DriverRetryable, InvalidChange
from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.defects import Defects
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.rpc.boundary import BoundaryInterceptor
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.codec import optional
from orchestrrl.rpc.codecs import ocs as convert
from orchestrrl.rpc.pb import ocs_pb2 as pb
from orchestrrl.rpc.pb import ocs_pb2_grpc
from orchestrrl.rpc.refusals import Context, read, status_text

ERROR_METADATA = "ocs-driver-error-bin"


class OcsDriverService(ocs_pb2_grpc.OcsDriverServicer):
    """The gRPC service of one driver. A commit is completed even if the client disconnects, because a half-finished
    change must not remain."""

    def __init__(self, driver: OcsDriver) -> None:
        self._driver = driver

    async def GetFacts(self, request: pb.GetFactsRequest, context: Context) -> pb.DeviceFacts:
        return convert.facts_to_pb(await self._driver.facts(), await self._driver.capabilities())

    async def ListPorts(self, request: pb.ListPortsRequest, context: Context) -> pb.ListPortsResponse:
        ports = await self._driver.ports()
        return pb.ListPortsResponse(ports=map(convert.PORT.to_pb, ports))

    async def ListCrossConnects(
        self, request: pb.ListCrossConnectsRequest, context: Context
    ) -> pb.ListCrossConnectsResponse:
        return convert.READING.to_pb(await self._driver.cross_connects())

    async def Plan(self, request: pb.PlanChangeRequest, context: Context) -> pb.ChangeDiff:
        change, mode = await read(context, request, convert.change_from_pb)
        return convert.DIFF.to_pb(await self._driver.plan(change, mode))

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResult:
        diff = await read(context, request.diff, convert.DIFF.from_pb)
        commit = self._driver.commit(diff, request.expect_revision, optional(request, "revert_in_s"))
        return convert.RESULT.to_pb(await asyncio.shield(commit))

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        await asyncio.shield(self._driver.confirm(request.revision))
        return pb.ConfirmResponse()

    async def TakeOver(self, request: pb.TakeOverRequest, context: Context) -> pb.ListCrossConnectsResponse:
        pairs = await read(context, request.cross_connects, convert.pairs_from_pb)
        return convert.READING.to_pb(await self._driver.take_over(pairs))

    async def CommitArmed(
        self, request_iterator: AsyncIterator[pb.CommitOrder], context: Context
    ) -> AsyncIterator[pb.CommitAnswer]:
        orders = aiter(request_iterator)
        if (first := await anext(orders, None)) is None:
            return
        if not first.HasField("arm"):
            raise ProblemFaults([f"the first order must be arm, got {first.WhichOneof('order')}"])
        diff = await read(context, first.arm.diff, convert.DIFF.from_pb)
        await self._driver.facts()  # connects
        yield pb.CommitAnswer(armed=pb.CommitAnswer.Armed())
        if await anext(orders, None) is None:
            return  # not wanted any more
        commit = self._driver.commit(diff, first.arm.expect_revision, optional(first.arm, "revert_in_s"))
        result = await asyncio.shield(commit)
        yield pb.CommitAnswer(result=convert.RESULT.to_pb(result))

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.Verification:
        return convert.VERIFICATION.to_pb(
            await self._driver.verify(await read(context, request.diff, convert.DIFF.from_pb))
        )

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.CommitResult:
        diff = await read(context, request.diff, convert.DIFF.from_pb)
        return convert.RESULT.to_pb(await asyncio.shield(self._driver.rollback(diff)))

    async def Watch(self, request: pb.WatchEventsRequest, context: Context) -> AsyncIterator[pb.DeviceEvent]:
        async for event in self._driver.watch():
            yield convert.EVENT.to_pb(event)


class DriverBoundary(BoundaryInterceptor):
    """The interceptor of a driver's server. Driver errors are returned with all of their fields in the trailing
    metadata. A defect of the driver is answered with INTERNAL. The client then treats the outcome of a change as
    unknown, because the driver may have sent a command."""

    async def end(self, method: str, context: Context, error: Exception) -> None:
        if isinstance(error, DriverError):
            metadata = ((ERROR_METADATA, convert.error_to_pb(error).SerializeToString()),)
            await context.abort(status_of(error), status_text(error), metadata)
        await super().end(method, context, error)


def status_of(error: DriverError) -> grpc.StatusCode:
    match error:
        case InvalidChange():
            return grpc.StatusCode.INVALID_ARGUMENT
        case CircuitConflict():
            return grpc.StatusCode.FAILED_PRECONDITION
        case DriverRetryable():
            return grpc.StatusCode.UNAVAILABLE
        case DriverOutcomeUnknown():
            return grpc.StatusCode.UNKNOWN
        case _:
            return grpc.StatusCode.FAILED_PRECONDITION


async def serve_driver(driver: OcsDriver, address: str) -> tuple[grpc.aio.Server, int]:
    """Start a server for one device at `address`, where port 0 selects any free port. Return the server and its
    port."""
    boundary = DriverBoundary(LimitSettings(), Defects(WallClock(), lambda _: None))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(boundary,))
    ocs_pb2_grpc.add_OcsDriverServicer_to_server(OcsDriverService(driver), server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, port
