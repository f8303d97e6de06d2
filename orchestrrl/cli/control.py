"""How commands talk to a running daemon: where it is, and one conversation with it."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrrl.cli.output import reporting_errors
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.addresses import parse_address
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from orchestrrl.rpc.control_client import ControlClient

_Result = TypeVar("_Result")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response", bound="Message")

DAEMON_VARIABLE = "ORCHESTRRL_DAEMON"

DaemonOption = Annotated[
    str,
    typer.Option("--daemon", envvar=DAEMON_VARIABLE, metavar="ADDRESS", help="The daemon, as HOST:PORT or unix:PATH."),
]


def address_faults(address: str) -> list[str]:
    """What is wrong with the value of --daemon."""
    if address.startswith("unix:"):
        return [] if address.removeprefix("unix:") else [f"--daemon: names no socket, got {address!r}"]
    try:
        parse_address(address)
    except ValueError as error:
        return [f"--daemon: {error}, or unix:PATH, got {address!r}"]
    return []


def call_daemon(address: str, conversation: Callable[["ControlClient"], Awaitable[_Result]]) -> _Result:
    """The result of a conversation with the daemon; its errors become messages and exit statuses."""
    import asyncio

    from orchestrrl.rpc.control_client import ControlClient

    async def converse() -> _Result:
        async with ControlClient(address) as client:
            return await conversation(client)

    with reporting_errors():
        _check(address)
        return asyncio.run(converse())


async def answer(
    client: "ControlClient",
    method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
    request: _Request,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """The daemon's answer to one request, as plain values."""
    response = await client.call(method, request, timeout_s)
    return plain(response)


def follow(address: str, conversation: Callable[["ControlClient"], Awaitable[None]]) -> None:
    """A conversation that lasts until the daemon ends it or the operator does."""
    from orchestrrl.rpc.control_client import ControlClient

    async def converse() -> None:
        async with ControlClient(address) as client:
            await conversation(client)

    with reporting_errors():
        _check(address)
        until_stopped(converse())


def _check(address: str) -> None:
    faults = address_faults(address)
    if faults:
        raise ProblemFaults(faults)
