"""How calls that cannot be answered end: our errors as gRPC statuses, which say what to do next."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc

from orchestrrl.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, Retryable

Context = grpc.aio.ServicerContext[Any, Any]
_Message = TypeVar("_Message")
_Value = TypeVar("_Value")


async def refuse(context: Context, error: OrchestrRLError | ValueError) -> NoReturn:
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
async def refusing(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except OrchestrRLError as error:
        await refuse(context, error)


async def read(context: Context, message: _Message, read: Callable[[_Message], _Value]) -> _Value:
    try:
        return read(message)
    except ValueError as error:
        await refuse(context, error)
