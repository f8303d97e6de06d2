"""End calls that cannot be answered, with gRPC statuses from which callers can derive their next step."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc

from ocs_drivers.errors import DriverError, DriverOutcomeUnknown, DriverPermanent, DriverRetryable, InvalidChange
from orchestrrl.core.errors import (
    LimitReached,
    OrchestrRLError,
    OutcomeUnknown,
    Permanent,
    ProblemFaults,
    Retryable,
    cut,
)

Context = grpc.aio.ServicerContext[Any, Any]
STATUS_BYTES = 6000  # of a header; all headers of a call together must stay below 8 KiB
LEAST_CHARACTERS = 40

_Message = TypeVar("_Message")
_Value = TypeVar("_Value")


async def refuse(context: Context, error: OrchestrRLError | DriverError | ValueError) -> NoReturn:
    """End the call with the gRPC status that corresponds to the error."""
    code = grpc.StatusCode.INTERNAL
    match error:
        case ProblemFaults() | InvalidChange() | ValueError():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case LimitReached():
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
        case Permanent() | DriverPermanent():
            code = grpc.StatusCode.FAILED_PRECONDITION
        case Retryable() | DriverRetryable():
            code = grpc.StatusCode.ABORTED
        case OutcomeUnknown() | DriverOutcomeUnknown():
            code = grpc.StatusCode.DEADLINE_EXCEEDED
    await context.abort(code, status_text(error))


def status_text(error: Exception | str) -> str:
    """Return as many of the error's lines as a status can hold. A status is sent in a header, where each byte of
    non-ASCII text usually occupies three bytes."""
    lines = str(error).encode(errors="replace").decode().splitlines() or [type(error).__name__]
    words: list[str] = []
    room = STATUS_BYTES
    for place, line in enumerate(lines):
        while (size := _header_bytes(line)) > room and len(line) > LEAST_CHARACTERS:
            line = cut(line, max(LEAST_CHARACTERS, len(line) // 2))
        if size > room:
            words.append(f"(message): has {len(lines) - place} more faults")
            break
        words.append(line)
        room -= size
    return "\n".join(words)


def _header_bytes(line: str) -> int:
    return sum(1 if 0x20 <= byte <= 0x7E else 3 for byte in f"{line}\n".encode())


async def read(context: Context, message: _Message, read: Callable[[_Message], _Value]) -> _Value:
    try:
        return read(message)
    except ValueError as error:
        await refuse(context, error)
