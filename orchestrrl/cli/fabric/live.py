"""`orchestrrl fabric status|periods|announce|pin|override|release|mask`: the circuits of a running daemon."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import JsonFlag, Reason, TimeToLive, daemon_command
from orchestrrl.cli.control import answer
from orchestrrl.cli.fabric.text import circuits_view, counts_view, hosts_view, periods_view, route_lines, times_table
from orchestrrl.cli.fleet.status import fabric_control_text, period_text
from orchestrrl.cli.lazy import ControlClient, fabric_pb2
from orchestrrl.cli.output import Output, View, fail, raise_faults, stdout
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.rpc.plain_values import plain

NONE_HERE = "this daemon drives no optical fabric: name its site in fabric.site of its configuration"
PERIODS_SHOWN = 20

JobOption = Annotated[str, typer.Option(help="Whose period; needed where several jobs have announced its name.")]


@daemon_command
async def status(client: ControlClient) -> Output:
    """Show which circuits are up, for which period, what is masked or pinned, and whose traffic is traced.

    Example: `orchestrrl fabric status`
    """
    seen = await _fetch(client, PERIODS_SHOWN)
    return Output(seen, _status_view(seen))


def _status_view(seen: dict[str, Any]) -> View:
    yield f"circuits of: {escape(seen['period'] or ('no one period' if seen['circuits'] else 'no period yet'))}"
    yield f"operator: {escape(fabric_control_text(seen['control']))}"
    yield from (f"last period: {escape(period_text(latest))}" for latest in seen["periods"][:1])
    yield from (f"[yellow]not used[/yellow]: {escape(what)}" for what in seen["masked"])
    yield from route_lines(seen.get("routes"))
    yield from circuits_view(seen["circuits"])
    yield times_table(seen["switch_times"])
    yield from hosts_view(seen["hosts"])


@daemon_command
async def periods(
    client: ControlClient, limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = PERIODS_SHOWN
) -> Output:
    """List what became of the latest periods, and count all of them by state and reason.

    Example: `orchestrrl fabric periods --limit 50`
    """
    seen = await _fetch(client, limit)
    document = {"periods": seen["periods"], "counts": seen["counts"]}
    return Output(document, [*periods_view(seen["periods"]), *counts_view(seen["counts"])])


@daemon_command
async def announce(
    client: ControlClient,
    period: Annotated[str, typer.Argument(help="Its recurring name.", metavar="PERIOD")],
    intent: Annotated[
        Path | None, typer.Option(help="JSON of what it does; by default as before.", metavar="FILE")
    ] = None,
    within_s: Annotated[float, typer.Option(help="How long a window is waited for; 0: as configured.")] = 0,
    boundary: Annotated[
        bool, typer.Option("--boundary", help="Nothing runs until this ends: no window is waited for.")
    ] = False,
    job: JobOption = "",
    as_json: JsonFlag = False,
) -> Output:
    """Announce a communication period, as a trainer does, and follow what becomes of its circuits.

    FILE is an intent: {"stage": "train", "traffic": [{"operation": "DP", "primitive": "ring_all_reduce", "groups":
    [[0, 8]], "bytes_per_rank": 4e9}]}. docs/fabric.md has every field. Exit status 0 if committed or kept.

    Example: `orchestrrl fabric announce weights --intent weights.json --boundary`
    """
    text = _intent_text(period, intent, within_s)
    order = fabric_pb2.AnnouncePeriodRequest(
        period=period, intent_json=text, within_s=within_s, boundary=boundary, job=job
    )
    last: dict[str, Any] = {}
    async for report in client.watch(client.fabric.AnnouncePeriod, order):
        seen = plain(report)
        if not as_json and seen["state"] != last.get("state"):
            stdout().print(escape(period_text(seen)))
        last = seen
    failed = last["state"] not in ("committed", "kept")
    return Output(last, map(escape, last["notes"]), failure="" if failed else None)


@daemon_command
async def pin(
    client: ControlClient,
    cross_connects: Annotated[
        list[str] | None, typer.Argument(help="Those that stay; none: all that are up.", metavar="SWITCH:PORT-PORT...")
    ] = None,
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
) -> Output:
    """Keep circuits as they are, until released or expired.

    Example: `orchestrrl fabric pin core0:1-5 --reason "measuring this link" --ttl-s 600`
    """
    order = fabric_pb2.PinFabricRequest(cross_connects=cross_connects or [], reason=reason, ttl_s=ttl_s)
    return _control(await answer(client, client.fabric.PinFabric, order))


@daemon_command
async def override(
    client: ControlClient,
    period: Annotated[str, typer.Argument(help="One that was announced before.", metavar="PERIOD")],
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
    job: JobOption = "",
) -> Output:
    """Have the circuits of one period, whatever else its job announces, until released or expired.

    It stands for those of train and weight_sync, one of generation for those of generation. They are changed as that
    period's always are: in a window, or at a boundary. What other jobs announce goes on.

    Example: `orchestrrl fabric override gradients --reason "comparing" --ttl-s 600`
    """
    order = fabric_pb2.OverrideFabricRequest(period=period, reason=reason, ttl_s=ttl_s, job=job)
    return _control(await answer(client, client.fabric.OverrideFabric, order))


@daemon_command
async def release(client: ControlClient, reason: Reason = "") -> Output:
    """Let circuits follow what is announced again.

    Example: `orchestrrl fabric release`
    """
    return _control(await answer(client, client.fabric.ReleaseFabric, fabric_pb2.ReleaseFabricRequest(reason=reason)))


@daemon_command
async def mask(
    client: ControlClient,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT...",
            help="switch:S, port:S:P, circuit:S:P-P, nic:SERVER:I or server:SERVER; none: all may be used again.",
        ),
    ] = None,
    reason: Reason = "",
) -> Output:
    """Say what must not be used, beside what switches report of themselves. The whole list each time.

    `orchestrrl fabric status` shows the present list.

    Example: `orchestrrl fabric mask port:core0:7 nic:train0/s1:3 --reason "flapping"`
    """
    masked = [each.replace(":", " ", 1) for each in what or []]
    order = fabric_pb2.MaskFabricRequest(masked=masked, reason=reason)
    found = (await answer(client, client.fabric.MaskFabric, order))["masked"]
    lines = [f"not used: {escape(each)}" for each in found] or ["everything may be used"]
    return Output({"masked": found}, lines)


async def _fetch(client: ControlClient, limit: int) -> dict[str, Any]:
    seen = await answer(client, client.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=limit))
    if not seen["configured"]:
        fail(NONE_HERE)
    return seen


def _intent_text(period: str, source: Path | None, within_s: float) -> str:
    """Raises ProblemFaults with all that is wrong with an announcement, before the daemon is asked."""
    from orchestrrl.core.documents import read_text
    from orchestrrl.fabric.intents import parse_intent

    faults = [] if 0 <= within_s < float("inf") else [f"--within-s: must be >= 0, got {within_s:g}"]
    text = ""
    try:
        if source is not None:
            text = read_text(source)
            parse_intent(period, text)
        elif not period:
            faults.append("PERIOD: must be a name, got ''")
    except ProblemFaults as error:
        faults += error.faults
    raise_faults(faults)
    return text


def _control(control: dict[str, Any]) -> Output:
    return Output(control, [escape(f"circuits: {fabric_control_text(control)}")])
