"""`orchestrrl fabric status|periods|announce|pin|override|release|mask`: the circuits of a running daemon."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.fabric.text import (
    route_lines,
    show_circuits,
    show_counts,
    show_hosts,
    show_periods,
    show_switch_times,
)
from orchestrrl.cli.fleet.status import fabric_control_text, period_text
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import fabric_pb2
from orchestrrl.cli.output import EXIT_FAILURE, JsonFlag, fail, print_json, print_lines, stdout
from orchestrrl.cli.plan.live import Reason, TimeToLive
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

NONE_HERE = "this daemon drives no optical fabric: name its site in fabric.site of its configuration"
PERIODS_SHOWN = 20

JobOption = Annotated[
    str, typer.Option("--job", help="Whose period; needed where several jobs have announced its name.")
]


def status(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Show which circuits are up, for which period, what is masked or pinned, and whose traffic is traced.

    Example: `orchestrrl fabric status`
    """
    seen = _fetch(daemon, PERIODS_SHOWN if as_json else 1)
    if as_json:
        print_json(seen)
        return
    control, latest = seen["control"], next(iter(seen["periods"]), None)
    lines = [
        f"circuits of: {escape(seen['period'] or ('no one period' if seen['circuits'] else 'no period yet'))}",
        f"operator: {escape(fabric_control_text(control))}",
    ]
    if latest is not None:
        lines.append(f"last period: {escape(period_text(latest))}")
    lines += [f"[yellow]not used[/yellow]: {escape(what)}" for what in seen["masked"]]
    lines += route_lines(seen.get("routes"))
    print_lines(lines)
    show_circuits(seen["circuits"])
    show_switch_times(seen["switch_times"])
    show_hosts(seen["hosts"])


def periods(
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many.")] = PERIODS_SHOWN,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """List what became of the latest periods, and count all of them by state and reason.

    Example: `orchestrrl fabric periods --limit 50`
    """
    seen = _fetch(daemon, limit)
    if as_json:
        print_json({"periods": seen["periods"], "counts": seen["counts"]})
        return
    show_periods(seen["periods"])
    show_counts(seen["counts"])


def announce(
    period: Annotated[str, typer.Argument(help="Its recurring name.", metavar="PERIOD")],
    intent: Annotated[
        Path | None, typer.Option("--intent", help="JSON of what it does; by default as before.", metavar="FILE")
    ] = None,
    within_s: Annotated[
        float, typer.Option("--within-s", help="How long a window is waited for; 0: as configured.")
    ] = 0,
    boundary: Annotated[
        bool, typer.Option("--boundary", help="Nothing runs until this ends: no window is waited for.")
    ] = False,
    job: JobOption = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Announce a communication period, as a trainer does, and follow what becomes of its circuits.

    FILE is an intent: {"stage": "train", "traffic": [{"operation": "DP", "primitive": "ring_all_reduce", "groups":
    [[0, 8]], "bytes_per_rank": 4e9}]}. docs/fabric.md has every field. Exit status 0 if committed or kept.

    Example: `orchestrrl fabric announce weights --intent weights.json --boundary`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
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
        return last

    last = call_daemon(daemon, conversation)
    if as_json:
        print_json(last)
    else:
        print_lines(escape(note) for note in last["notes"])
    if last["state"] not in ("committed", "kept"):
        raise typer.Exit(EXIT_FAILURE)


def pin(
    cross_connects: Annotated[
        list[str] | None, typer.Argument(help="Those that stay; none: all that are up.", metavar="SWITCH:PORT-PORT...")
    ] = None,
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Keep circuits as they are, until released or expired.

    Example: `orchestrrl fabric pin core0:1-5 --reason "measuring this link" --ttl-s 600`
    """
    order = fabric_pb2.PinFabricRequest(cross_connects=cross_connects or [], reason=reason, ttl_s=ttl_s)
    _control(daemon, lambda client: answer(client, client.fabric.PinFabric, order), as_json)


def override(
    period: Annotated[str, typer.Argument(help="One that was announced before.", metavar="PERIOD")],
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
    job: JobOption = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Have the circuits of one period, whatever else its job announces, until released or expired.

    It stands for those of train and weight_sync, one of generation for those of generation. They are changed as that
    period's always are: in a window, or at a boundary. What other jobs announce goes on.

    Example: `orchestrrl fabric override gradients --reason "comparing" --ttl-s 600`
    """
    order = fabric_pb2.OverrideFabricRequest(period=period, reason=reason, ttl_s=ttl_s, job=job)
    _control(daemon, lambda client: answer(client, client.fabric.OverrideFabric, order), as_json)


def release(reason: Reason = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Let circuits follow what is announced again.

    Example: `orchestrrl fabric release`
    """
    order = fabric_pb2.ReleaseFabricRequest(reason=reason)
    _control(daemon, lambda client: answer(client, client.fabric.ReleaseFabric, order), as_json)


def mask(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT...",
            help="switch:S, port:S:P, circuit:S:P-P, nic:SERVER:I or server:SERVER; none: all may be used again.",
        ),
    ] = None,
    reason: Reason = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Say what must not be used, beside what switches report of themselves. The whole list each time.

    `orchestrrl fabric status` shows the present list.

    Example: `orchestrrl fabric mask port:core0:7 nic:train0/s1:3 --reason "flapping"`
    """
    masked = [each.replace(":", " ", 1) for each in what or []]

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = fabric_pb2.MaskFabricRequest(masked=masked, reason=reason)
        return await answer(client, client.fabric.MaskFabric, order)

    seen = call_daemon(daemon, conversation)
    if as_json:
        print_json({"masked": seen["masked"]})
    else:
        print_lines([f"not used: {escape(each)}" for each in seen["masked"]] or ["everything may be used"])


def _fetch(daemon: str, limit: int) -> dict[str, Any]:
    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return await answer(client, client.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=limit))

    seen = call_daemon(daemon, conversation)
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
    if faults:
        raise ProblemFaults(faults)
    return text


def _control(daemon: str, conversation: Any, as_json: bool) -> None:
    control = call_daemon(daemon, conversation)
    if as_json:
        print_json(control)
    else:
        stdout().print(escape(f"circuits: {fabric_control_text(control)}"))


def register(app: typer.Typer) -> None:
    fabric = group(app, "fabric")
    for command in (status, periods, announce, pin, override, release, mask):
        fabric.command(command.__name__)(command)
