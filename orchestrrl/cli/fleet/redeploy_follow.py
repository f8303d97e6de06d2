"""Following a redeployment: in a terminal a table that is renewed in place, in a pipe a line for each change.

The redeployment runs by itself. Whoever looks on may leave, and may stay while the daemon is away.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import typer
from rich.live import Live
from rich.markup import escape

from orchestrrl.cli.control import answer, call_daemon
from orchestrrl.cli.lazy import control_pb2
from orchestrrl.cli.lazy import redeploy_text as words
from orchestrrl.cli.output import stderr, stdout
from orchestrrl.core.errors import OutcomeUnknown, Retryable
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

POLL_EVERY_S = 0.5
# What engines can do is asked of them before the daemon answers.
FIRST_WITHIN_S = 60.0
EXIT_LEFT = 130  # as shells have it for Ctrl-C: what it came to is not known

Reports = Callable[["ControlClient"], AsyncIterator[dict[str, Any]]]


async def fetch_redeployment(client: "ControlClient", redeployment_id: str) -> dict[str, Any]:
    return await answer(
        client, client.control.GetRedeployment, control_pb2.GetRedeploymentRequest(redeployment_id=redeployment_id)
    )


async def first(client: "ControlClient", order: "control_pb2.RedeployRequest") -> dict[str, Any]:
    """The draft, or the redeployment as it begins."""
    import asyncio

    try:
        async with asyncio.timeout(FIRST_WITHIN_S), aclosing(_ordered(client, order)) as told:
            async for report in told:
                return report
    except TimeoutError:
        raise OutcomeUnknown(f"the daemon at {client.address} gave no answer in time") from None
    raise OutcomeUnknown(f"the daemon at {client.address} ended the call without an answer")


async def reports(client: "ControlClient", order: "control_pb2.RedeployRequest") -> AsyncIterator[dict[str, Any]]:
    """Each as the redeployment goes on. It outlives the daemon's being away: then its next life is asked."""
    report: dict[str, Any] | None = None
    try:
        async for report in _ordered(client, order):
            yield report
    except (Retryable, OutcomeUnknown):
        if report is None:
            raise
    if report is None:
        raise OutcomeUnknown(f"the daemon at {client.address} ended the call without an answer")
    if report["state"] == "running":
        async for later in poll_redeployment(client, report["redeployment_id"], known=True):
            yield later


async def _ordered(client: "ControlClient", order: "control_pb2.RedeployRequest") -> AsyncGenerator[dict[str, Any]]:
    async for message in client.watch(client.control.Redeploy, order):
        yield plain(message)


async def poll_redeployment(
    client: "ControlClient", redeployment_id: str, known: bool = False
) -> AsyncIterator[dict[str, Any]]:
    """The redeployment again and again, until it has ended. `known`: the daemon has told of it; then it may be away."""
    import asyncio

    away = False
    while True:
        try:
            report = await fetch_redeployment(client, redeployment_id)
        except (Retryable, OutcomeUnknown):
            if not known:
                raise
            if not away:
                stderr().print(
                    "the daemon is away: the redeployment goes on, or back, once it is there again", soft_wrap=True
                )
            away = True
        else:
            away, known, redeployment_id = False, True, report["redeployment_id"]
            yield report
            if report["state"] != "running":
                return
        await asyncio.sleep(POLL_EVERY_S)


def until_over(daemon: str, watched: Reports, as_json: bool) -> dict[str, Any]:
    """The last report of the redeployment; on the way there, how it goes on."""
    latest: dict[str, Any] = {}

    async def follow(client: "ControlClient", show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        async for report in watched(client):
            show(report)
            latest.update(report)
        return latest

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        if as_json or not stdout().is_terminal:
            lines = stderr() if as_json else stdout()

            def show(report: dict[str, Any]) -> None:
                for line in words.news(latest or None, report):
                    lines.print(line, soft_wrap=True)

            return await follow(client, show)
        with Live(
            console=stdout(),
            transient=True,
            refresh_per_second=4,
            get_renderable=lambda: words.picture(latest, time.time()) if latest else "",
        ):
            return await follow(client, lambda report: None)

    try:
        return call_daemon(daemon, conversation)
    except KeyboardInterrupt:
        stderr().print(f"\n{_left(latest)}", soft_wrap=True)
        raise typer.Exit(EXIT_LEFT) from None


def _left(latest: dict[str, Any]) -> str:
    if not latest:
        return "the daemon has not answered: it may have begun; look with [bold]orchestrrl redeploy[/bold]"
    redeployment_id = latest["redeployment_id"]
    return f"redeployment [bold]{escape(redeployment_id)}[/bold] goes on by itself; {advice(redeployment_id)}"


def advice(redeployment_id: str) -> str:
    named = f" --id {escape(redeployment_id)}"
    return (
        f"watch it with [bold]orchestrrl redeploy --watch{named}[/bold], "
        f"take it back with [bold]orchestrrl redeploy --cancel{named}[/bold]"
    )
