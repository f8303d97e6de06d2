"""Intercept the calls of every method of a gRPC server, decode and check their messages, and end failed calls.

A message that cannot be decoded or has values out of range is answered with INVALID_ARGUMENT, and a message that
exceeds a limit with RESOURCE_EXHAUSTED. Each such message is logged on one line. ranges.py defines the valid values. An
unexpected exception is treated as a defect of the daemon. It is counted, logged once and answered with INTERNAL, and
the server continues.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ocs_drivers.errors import DriverError
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.defects import Defects
from orchestrrl.core.errors import LimitReached, OrchestrRLError, ProblemFaults, few
from orchestrrl.rpc.ranges import checking
from orchestrrl.rpc.refusals import Context, refuse

logger = logging.getLogger(__name__)

DEFECT = "internal error, see the server's log"


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor of one gRPC server. `defects` counts the unexpected exceptions in calls."""

    def __init__(self, limits: LimitSettings, defects: Defects) -> None:
        self._limits = limits
        self._defects = defects
        self._open = 0  # number of calls
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_lost_answer)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # unknown method, which gRPC answers
            return None
        call = _Call(self, str(handler_call_details.method), handler)
        make: Any = getattr(grpc, f"{call.kind}_rpc_method_handler")
        behaviour = call.stream if handler.response_streaming else call.once
        handled: grpc.RpcMethodHandler[Any, Any] = make(behaviour, None, handler.response_serializer)
        return handled

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count a call as open during the `with` statement. Raises LimitReached if too many calls are open."""
        if self._open >= self._limits.calls:
            raise LimitReached(
                f"(call): at most {self._limits.calls} calls may be open at a time (limits.calls), got"
                f" {self._open + 1}; try again later"
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def read(self, raw: bytes, deserialize: Callable[[bytes], Any]) -> Any:
        """Decode and check a message. A large message is checked in steps, so that other calls can continue between the
        steps. Raises LimitReached if the message exceeds a limit, and ProblemFaults if it is invalid."""
        if len(raw) > self._limits.message_bytes:
            most = self._limits.message_bytes
            raise LimitReached(f"(message): must be at most {most} bytes (limits.message_bytes), got {len(raw)}")
        try:
            message = deserialize(raw)
        except DecodeError:
            raise ProblemFaults(
                [f"(message): must be a message of the method's type, got {len(raw)} bytes that cannot be decoded"]
            ) from None
        for _ in checking(message, self._limits):
            await asyncio.sleep(0)
        return message

    async def end(self, method: str, context: Context, error: Exception) -> None:
        """End the call with the gRPC status that corresponds to the error. An unexpected error is counted as a
        defect."""
        if isinstance(error, OrchestrRLError | DriverError):
            if isinstance(error, ProblemFaults | LimitReached):
                logger.warning("refused call %s of %s: %s", method, context.peer(), few(str(error).splitlines(), 3))
            await refuse(context, error)
        self._defects.met(method.removeprefix("/"), error)
        await context.abort(grpc.StatusCode.INTERNAL, DEFECT)


class _Call:
    """One call of a gRPC method. Its messages are checked before the handler receives them."""

    def __init__(self, boundary: BoundaryInterceptor, method: str, handler: Any) -> None:
        self._boundary = boundary
        self._method = method
        self._deserialize = handler.request_deserializer
        self._streams_in = handler.request_streaming
        sides = (handler.request_streaming, handler.response_streaming)
        self.kind = "_".join("stream" if is_stream else "unary" for is_stream in sides)  # as gRPC names it
        self._behaviour = getattr(handler, self.kind)
        self._refused: OrchestrRLError | None = None

    async def once(self, raw: Any, context: Context) -> Any:
        async with self._ending(context):
            return await self._behaviour(await self._request(raw), context)

    async def stream(self, raw: Any, context: Context) -> AsyncIterator[Any]:
        async with self._ending(context):
            await context.send_initial_metadata(())  # informs the client that it is connected
            answers = self._behaviour(await self._request(raw), context)
            if hasattr(answers, "__aiter__"):
                async with aclosing(answers):
                    async for answer in answers:
                        yield answer
            else:  # the handler writes the answers itself
                await answers

    @asynccontextmanager
    async def _ending(self, context: Context) -> AsyncIterator[None]:
        """Count the call as open during the `async with` statement. If the handler raises an exception or a message was
        refused, end the call with the corresponding status."""
        try:
            try:
                with self._boundary.opened():
                    yield
                if self._refused is not None:
                    raise self._refused
            except grpc.aio.BaseError:  # the call has been ended
                raise
            except Exception as error:  # noqa: BLE001 (counted and logged there)
                await self._boundary.end(self._method, context, error)
        except grpc.aio.InternalError:  # the client has disconnected: no status can be sent
            raise asyncio.CancelledError from None

    async def _request(self, raw: Any) -> Any:
        return self._messages(raw) if self._streams_in else await self._boundary.read(raw, self._deserialize)

    async def _messages(self, raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        """Yield the stream's messages until a message is refused. The call ends only after its handler has ended,
        because the handler may read messages in a separate task, and that task must not end the call."""
        async for raw in raws:
            try:
                message = await self._boundary.read(raw, self._deserialize)
            except OrchestrRLError as error:
                self._refused = error
                return
            yield message


def _is_no_lost_answer(record: logging.LogRecord) -> bool:
    """Return False for gRPC's traceback about a response that could not be sent because the client has disconnected,
    for example after its deadline. Return True for all other log records."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, grpc.aio.InternalError):
        return True
    logger.debug("an answer could not be sent: the client has disconnected")
    return False
