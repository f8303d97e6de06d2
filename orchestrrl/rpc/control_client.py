"""A client of the daemon's Control, Switches, Fabric and Weights services. It raises OrchestrRL's errors in place of
gRPC's."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, TypeVar

import grpc

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.rpc.channel import CHANNEL_OPTIONS
from orchestrrl.rpc.pb import control_pb2_grpc, fabric_pb2_grpc, weights_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

CALL_TIMEOUT_S = 30.0
OUT_OF_TIME = "Deadline Exceeded"  # gRPC's text for a call that exceeded its deadline
# gRPC's text if the server answers with a protocol other than HTTP/2.
NOT_GRPC = "Failed parsing HTTP/2"


class ControlClient:
    """One connection to the daemon at `address`, `HOST:PORT` or `unix:PATH`.

        async with ControlClient("127.0.0.1:7070") as client:
            status = await client.call(client.control.GetStatus, control_pb2.GetStatusRequest())

    Every call raises Retryable if the daemon is unreachable or temporarily declines the request, ProblemFaults if the
    request is malformed, and Permanent if repeating the request cannot succeed. It raises OutcomeUnknown if the outcome
    is unknown, for example because the response was lost.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.control = control_pb2_grpc.ControlStub(self._channel)
        self.switches = control_pb2_grpc.SwitchesStub(self._channel)
        self.fabric = fabric_pb2_grpc.FabricStub(self._channel)
        self.weights = weights_pb2_grpc.WeightsStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout_s: float | None = None,
    ) -> _Response:
        """Send one request and return the response. The default of `timeout_s` is CALL_TIMEOUT_S."""
        call = method(request, timeout=CALL_TIMEOUT_S if timeout_s is None else timeout_s)
        connected = False
        try:
            await call.wait_for_connection()
            connected = True
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, connected) from None

    async def watch(
        self, method: grpc.aio.UnaryStreamMultiCallable[_Request, _Response], request: _Request
    ) -> AsyncGenerator[_Response, None]:
        """Send one request and yield responses until the daemon ends the stream or the caller stops iterating."""
        call = method(request)
        connected = False
        try:
            await call.wait_for_connection()
            connected = True
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, connected) from None
        finally:
            call.cancel()

    def _translated(self, error: grpc.aio.AioRpcError, connected: bool) -> OrchestrRLError:
        details = error.details() or error.code().name.lower().replace("_", " ")
        match error.code():
            case grpc.StatusCode.UNAVAILABLE if not connected and NOT_GRPC in details:
                return Permanent(
                    f"the server at {self.address} is not an OrchestrRL daemon, but perhaps an HTTP server such as a "
                    "gateway, an engine or the daemon's metrics; set --daemon to the daemon's listen.address"
                )
            case grpc.StatusCode.UNAVAILABLE if not connected:
                advice = "start one with `orchestrrl up` or `orchestrrl daemon`, or set --daemon"
                return Retryable(f"no daemon at {self.address}: {advice}", after_s=1.0)
            case grpc.StatusCode.UNAVAILABLE:
                return OutcomeUnknown(f"the connection to the daemon at {self.address} broke: {details}")
            case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.ABORTED:
                return Retryable(f"the daemon at {self.address} declined temporarily: {details}", after_s=1.0)
            case grpc.StatusCode.INVALID_ARGUMENT:
                return ProblemFaults(details.splitlines())
            case grpc.StatusCode.NOT_FOUND | grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.ALREADY_EXISTS:
                return Permanent(details)
            case grpc.StatusCode.UNIMPLEMENTED:
                return Permanent(f"the server at {self.address} does not support this call ({details}): check --daemon")
            case grpc.StatusCode.DEADLINE_EXCEEDED if details != OUT_OF_TIME:
                return OutcomeUnknown(f"the daemon at {self.address} reports an unknown outcome: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return OutcomeUnknown(f"the daemon at {self.address} did not answer in time")
            case _:
                return OutcomeUnknown(f"the daemon at {self.address} failed: {details}")
