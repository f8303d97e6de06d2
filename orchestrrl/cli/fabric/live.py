"""`orchestrrl fabric status|periods|announce|pin|override|release|mask`: show and control a daemon's circuits."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import JsonFlag, Reason, TimeToLive, answer, daemon_command
from orchestrrl.cli.fleet.status import fabric_control_text, name_of_period, period_text
from orchestrrl.cli.formats import duration, time_of_day
from orchestrrl.cli.lazy import ControlClient, fabric_pb2
from orchestrrl.cli.output import Columns, Output, View, fail, raise_faults, stdout, table
from orchestrrl.core.errors import OutcomeUnknown, ProblemFaults
from orchestrrl.rpc.plain_values import plain

CIRCUITS_SHOWN = 40
REASONS_SHOWN = 8
PAIRS_SHOWN = 6
WINDOW_COLUMNS = 20
NARROW_WINDOW_COLUMNS = 10  # so that rows with the longest reasons fit on a line
WIDE_COLUMNS = 110
NO_PERIODS = "No period announced yet: a trainer announces them, or `orchestrrl fabric announce PERIOD --intent FILE`."
NONE_HERE = "this daemon has no optical fabric: set fabric.site in its configuration"
PERIODS_SHOWN = 20

JobOption = Annotated[
    str, typer.Option(help="The job of the period. Required if several jobs have announced the same name.")
]


@daemon_command
async def status(client: ControlClient) -> Output:
    """Show the circuits that are up, the period that they serve, masked and pinned parts, and the traced hosts.

    Example: `orchestrrl fabric status`
    """
    seen = await _fetch(client, PERIODS_SHOWN)
    return Output(seen, _status_view(seen))


def _status_view(seen: dict[str, Any]) -> View:
    yield f"circuits of: {escape(seen['period'] or ('several periods' if seen['circuits'] else 'no period yet'))}"
    yield f"operator: {escape(fabric_control_text(seen['control']))}"
    yield from (f"last period: {escape(period_text(latest))}" for latest in seen["periods"][:1])
    yield from (f"[yellow]masked[/yellow]: {escape(what)}" for what in seen["masked"])
    yield from route_lines(seen.get("routes"))
    yield from circuits_view(seen["circuits"])
    yield table("Duration of circuit changes", TIME_COLUMNS, seen["switch_times"])
    yield from hosts_view(seen["hosts"])


@daemon_command
async def periods(
    client: ControlClient, limit: Annotated[int, typer.Option(min=1, help="Maximum number of periods.")] = PERIODS_SHOWN
) -> Output:
    """List the latest periods with their outcomes, and the number of ended periods by state and reason.

    Example: `orchestrrl fabric periods --limit 50`
    """
    seen = await _fetch(client, limit)
    document = {"periods": seen["periods"], "counts": seen["counts"]}
    return Output(document, [*periods_view(seen["periods"]), *counts_view(seen["counts"])])


@daemon_command
async def announce(
    client: ControlClient,
    period: Annotated[str, typer.Argument(help="The period's recurring name.", metavar="PERIOD")],
    intent: Annotated[
        Path | None, typer.Option(help="JSON intent of the period. Default: its previous intent.", metavar="FILE")
    ] = None,
    within_s: Annotated[float, typer.Option(help="Seconds to wait for a window. 0: as configured.")] = 0,
    boundary: Annotated[
        bool, typer.Option("--boundary", help="Change circuits without a window: no traffic runs until this ends.")
    ] = False,
    job: JobOption = "",
    as_json: JsonFlag = False,
) -> Output:
    """Announce a communication period, as a trainer does, and follow the change of its circuits.

    FILE contains an intent, such as {"stage": "train", "traffic": [{"operation": "DP", "primitive": "ring_all_reduce",
    "groups": [[0, 8]], "bytes_per_rank": 4e9}]}. docs/fabric.md describes all fields. The exit status is 0 if the
    period is committed or kept.

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
    if not last:
        raise OutcomeUnknown(f"the daemon at {client.address} closed the call without a response")
    failed = last["state"] not in ("committed", "kept")
    return Output(last, map(escape, last["notes"]), failure="" if failed else None)


@daemon_command
async def pin(
    client: ControlClient,
    cross_connects: Annotated[
        list[str] | None, typer.Argument(help="Circuits to pin. Default: all.", metavar="SWITCH:PORT-PORT...")
    ] = None,
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
) -> Output:
    """Pin circuits, so that no period changes them, until they are released or the pin expires.

    Example: `orchestrrl fabric pin core0:1-5 --reason "measuring this link" --ttl-s 600`
    """
    order = fabric_pb2.PinFabricRequest(cross_connects=cross_connects or [], reason=reason, ttl_s=ttl_s)
    return _control(await answer(client, client.fabric.PinFabric, order))


@daemon_command
async def override(
    client: ControlClient,
    period: Annotated[str, typer.Argument(help="A period that was announced before.", metavar="PERIOD")],
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
    job: JobOption = "",
) -> Output:
    """Use the circuits of one period instead of those of its job's other periods, until the override ends.

    A period of stage gen overrides only periods of stage gen. Any other period overrides the periods of the stages
    train and weight_sync. Circuits change as announced for the period: in a window, or at a boundary. The periods of
    other jobs are not affected.

    Example: `orchestrrl fabric override gradients --reason "comparing" --ttl-s 600`
    """
    order = fabric_pb2.OverrideFabricRequest(period=period, reason=reason, ttl_s=ttl_s, job=job)
    return _control(await answer(client, client.fabric.OverrideFabric, order))


@daemon_command
async def release(client: ControlClient, reason: Reason = "") -> Output:
    """Release circuits from a pin or an override, so that they follow the announced periods again.

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
            help="switch:S, port:S:P, circuit:S:P-P, nic:SERVER:I or server:SERVER. None: clear the list.",
        ),
    ] = None,
    reason: Reason = "",
) -> Output:
    """Replace the list of masked parts. The fabric uses neither masked parts nor parts that switches report as failed.

    `orchestrrl fabric status` shows the current list.

    Example: `orchestrrl fabric mask port:core0:7 nic:train0/s1:3 --reason "flapping"`
    """
    masked = [each.replace(":", " ", 1) for each in what or []]
    order = fabric_pb2.MaskFabricRequest(masked=masked, reason=reason)
    found = (await answer(client, client.fabric.MaskFabric, order))["masked"]
    lines = [f"masked: {escape(each)}" for each in found] or ["nothing is masked"]
    return Output({"masked": found}, lines)


async def _fetch(client: ControlClient, limit: int) -> dict[str, Any]:
    seen = await answer(client, client.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=limit))
    if not seen["configured"]:
        fail(NONE_HERE)
    return seen


def _intent_text(period: str, source: Path | None, within_s: float) -> str:
    """Return the text of the intent in the file `source`, or an empty string if `source` is None. Raises ProblemFaults
    with all errors if the announcement is invalid."""
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


def circuits_view(circuits: Sequence[dict[str, Any]]) -> View:
    if not circuits:
        yield from ("No circuits are up.", "")
        return
    columns: Columns = {"where": lambda each: each["pod"] or "core", "from": "a", "to": "b", "circuits": "count"}
    yield table(f"Circuits: {sum(each['count'] for each in circuits)}", columns, circuits[:CIRCUITS_SHOWN])
    if len(circuits) > CIRCUITS_SHOWN:
        yield from (f"and between {len(circuits) - CIRCUITS_SHOWN} other pairs: use --json to list all", "")


def hosts_view(hosts: Sequence[dict[str, Any]]) -> View:
    if not hosts:
        yield "No host reports windows: run `orchestrrl agent --rings FOLDER` on the training hosts."
        return
    columns: Columns = {
        "host": "host",
        "ranks": lambda host: ", ".join(
            f"{len(job['ranks'])}{' of ' + job['job'] if job['job'] else ''}" for job in host["jobs"]
        ),
        "clock": lambda host: f"within {duration(host['bound_s'])}" if host["bound_s"] else None,
        "agent": lambda host: "attached" if host["attached"] else "gone",
        "reason for no window": _no_window,
    }
    yield table("Traced hosts", columns, hosts)


def _no_window(host: dict[str, Any]) -> str | None:
    if not host["attached"]:
        return "the agent is not connected"
    return host["detail"] or (None if host["jobs"] else "no recorder runs on the host")


def periods_view(periods: Sequence[dict[str, Any]]) -> View:
    if not periods:
        yield NO_PERIODS
        return
    yield table("Periods", PERIOD_COLUMNS, periods)
    yield from map(escape, reasons(periods))


def counts_view(counts: Sequence[dict[str, Any]]) -> View:
    if counts:
        yield table("Ended periods", {"state": "state", "reason": _why, "periods": "count"}, counts)


def reasons(periods: Iterable[dict[str, Any]]) -> list[str]:
    """Return lines with the distinct reasons for the outcomes of `periods`, in the order of `periods`."""
    found: dict[tuple[str, str], str] = {}
    for period in periods:
        if period["detail"]:
            line = f"{time_of_day(period['announced_unix_s'])} {name_of_period(period)}: {period['detail']}"
            found.setdefault((name_of_period(period), period["code"]), line)
    lines = list(found.values())
    more = [f"and {len(lines) - REASONS_SHOWN} more: use --json to list all"] if len(lines) > REASONS_SHOWN else []
    return [*lines[:REASONS_SHOWN], *more, ""] if lines else []


def _waited(period: dict[str, Any]) -> str:
    commits = period["commits"]
    return duration(commits[0]["commanded_unix_s"] - period["announced_unix_s"] if commits else None)


def _took(period: dict[str, Any]) -> str:
    commits = period["commits"]
    spans = [each["usable_unix_s"] - each["commanded_unix_s"] for each in commits]
    return duration(sum(spans) if commits else None)


def _windowed(period: dict[str, Any]) -> dict[str, Any] | None:
    """Return the period's first commit if it was made in a window, or None otherwise."""
    return next((each for each in period["commits"][:1] if each["window_until_unix_s"] > 0), None)


def _window(period: dict[str, Any]) -> str | None:
    commit = _windowed(period)
    return None if commit is None else duration(commit["window_until_unix_s"] - commit["window_opened_unix_s"])


def _commit(period: dict[str, Any]) -> str | None:
    commit = _windowed(period)
    columns = WINDOW_COLUMNS if stdout().width >= WIDE_COLUMNS else NARROW_WINDOW_COLUMNS
    return None if commit is None else in_window(commit, columns)


def _moves(period: dict[str, Any]) -> str:
    """Return the number of moves made, such as `3`, or `3 of 5` if five moves were planned."""
    made = sum(each["moves"] for each in period["commits"] if each["done"])
    return str(made) if made == period["moves"] else f"{made} of {period['moves']}"


TIME_COLUMNS: Columns = {
    "switch": "switch_id",
    "expected": lambda each: duration(each["usable_s"]),
    "changes measured": "samples",
}
PERIOD_COLUMNS: Columns = {
    "announced": lambda period: time_of_day(period["announced_unix_s"]),
    "period": name_of_period,
    "outcome": lambda period: ": ".join(filter(None, (period["state"], _why(period)))),
    "moves": _moves,
    "waited": _waited,
    "took": _took,
    "window": _window,
    "commit": _commit,
}


def in_window(commit: dict[str, Any], columns: int) -> str:
    """Return a drawing of a commit within its window, such as `──████────`. The line spans the window from its start to
    its promised end. A trailing `>` marks a commit that ended after the window."""
    opened_s: float = commit["window_opened_unix_s"]
    until_s: float = commit["window_until_unix_s"]
    length_s = until_s - opened_s
    if not length_s > 0:
        return ""

    def column(at_s: float) -> int:
        return min(columns, max(0, round((at_s - opened_s) / length_s * columns)))

    start = min(column(commit["commanded_unix_s"]), columns - 1)
    end = max(column(commit["usable_unix_s"]), start + 1)
    line = "─" * start + "█" * (end - start) + "─" * (columns - end)
    return line + (">" if commit["usable_unix_s"] > until_s else "")


def _why(report: dict[str, Any]) -> str | None:
    return None if report["code"] in ("", report["state"]) else str(report["code"])


def route_lines(routes: dict[str, Any] | None) -> list[str]:
    """Return lines about the packet routes over the circuits and about routing failures."""
    if routes is None:
        return ["packets: routers follow links without the daemon"]
    if not routes["rerouted_unix_s"]:
        return ["packets: not rerouted yet: the state of some circuits is unknown"]
    lines = [f"packets: over {routes['links']} links since {time_of_day(routes['rerouted_unix_s'])}"]
    for what, field in (("without a route", "unreachable"), ("over the packet network", "on_packet_side")):
        pairs, count = routes[field], routes[f"{field}_pairs"]
        if count:
            named = ", ".join(f"{each['from_tor']} -> {each['to_tor']}" for each in pairs[:PAIRS_SHOWN])
            more = f" and {count - PAIRS_SHOWN} more" if count > PAIRS_SHOWN else ""
            lines.append(f"{what}: {escape(named)}{more}")
    lines += [
        f"[yellow]no packets[/yellow] over {escape(each['what'])}: {escape(each['why'])}" for each in routes["left_out"]
    ]
    return lines + [
        f"[yellow]routing failed[/yellow] on {escape(each['what'])}: {escape(each['why'])}" for each in routes["failed"]
    ]
