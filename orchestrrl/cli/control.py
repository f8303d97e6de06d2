"""How commands talk to a running daemon: where it is, and one conversation with it."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrrl.cli.lazy import ControlClient
from orchestrrl.cli.output import raise_faults
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.addresses import parse_address
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message


_Result = TypeVar("_Result")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response", bound="Message")

DAEMON_VARIABLE = "ORCHESTRRL_DAEMON"

DaemonOption = Annotated[
    str,
    typer.Option("--daemon", envvar=DAEMON_VARIABLE, metavar="ADDRESS", help="The daemon, as HOST:PORT or unix:PATH."),
]


def address_faults(address: str) -> list[str]:
    """Return the faults of the value of --daemon."""
    if address.startswith("unix:"):
        return [] if address.removeprefix("unix:") else [f"--daemon: names no socket, got {address!r}"]
    try:
        parse_address(address)
    except ValueError as error:
        return [f"--daemon: {error}, or unix:PATH, got {address!r}"]
    return []


def call_daemon(address: str, conversation: Callable[[ControlClient], Awaitable[_Result]]) -> _Result:
    """Return the result of a conversation with the daemon. Raises OrchestrRLError."""
    import asyncio

    return asyncio.run(_converse(address, conversation))


def follow(address: str, conversation: Callable[[ControlClient], Awaitable[None]]) -> None:
    """Hold a conversation until the daemon or the operator ends it. Raises OrchestrRLError."""
    until_stopped(_converse(address, conversation))


async def _converse(address: str, conversation: Callable[[ControlClient], Awaitable[_Result]]) -> _Result:
    from orchestrrl.rpc import control_client

    raise_faults(address_faults(address))
    async with control_client.ControlClient(address) as client:
        return await conversation(client)


async def answer(
    client: ControlClient,
    method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
    request: _Request,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Return the daemon's answer to one request, as plain values."""
    response = await client.call(method, request, timeout_s)
    return plain(response)
