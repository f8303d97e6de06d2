"""`orchestrrl fabric slack`: how long it is quiet between collectives, and which switches fit in."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.control import DaemonOption, call_daemon
from orchestrrl.cli.formats import bar, count, duration, percent
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import fabric_pb2
from orchestrrl.cli.output import (
    EXIT_MALFORMED,
    JsonFlag,
    fail,
    print_json,
    print_lines,
    print_table,
    reporting_errors,
)
from orchestrrl.core.addresses import DEFAULT_TARGET

if TYPE_CHECKING:
    from orchestrrl.fabric.slack_traces import CommonQuiet
    from orchestrrl.rpc.control_client import ControlClient
    from planner.fabric.slack_summary import PositionSummary, SlackSummary

POSITIONS_SHOWN = 24  # the longest windows; all of them with --json
BAR = 24
RISK = 0.05
PICTURES = (".png", ".svg", ".pdf")

HELP = """Show how long it is quiet between the collectives of a job, and which optical switches fit in.

Of jobs that run, as the agents of their hosts tell it, or of traces: one JSON object per line, a collective (`rank`,
`op`, `group`, `bytes`, `start_s`, `end_s`, `async`), a mark (`rank`, `mark`, `at_s`) or the begin of an iteration
(`rank`, `iteration`, `at_s`). Prints the slack before each operation and the windows of an iteration with what may be
promised of them; of traces also when it is quiet on all ranks together.

Example:

    orchestrrl fabric slack trace.jsonl

    orchestrrl fabric slack --job trainer --plot slack.svg

    orchestrrl fabric slack rank0.jsonl rank1.jsonl --risk 0.01 --plot slack.svg
"""


def register(app: typer.Typer) -> None:
    group(app, "fabric").command("slack", help=HELP)(show_slack)


def show_slack(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE.jsonl...", help="Recorded collectives; none: of jobs that run, by the daemon."),
    ] = None,
    risk: Annotated[
        float | None, typer.Option(help="How often a promised window may be broken, 0 to 1.", show_default="0.05")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Only this one of the jobs that run.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the distributions: .png, .svg or .pdf.")] = None,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    faults = []
    if risk is not None and not 0 < risk < 1:
        faults.append(f"--risk: must be > 0 and < 1, got {risk:g}")
    if plot is not None and plot.suffix not in PICTURES:
        faults.append(f"--plot: must end in {', '.join(PICTURES)}, got {str(plot)!r}")
    if traces and job is not None:
        faults.append(f"--job: is for jobs that run, a trace has none, got {job!r}")
    if not traces and risk is not None:
        faults.append(f"--risk: is for traces, the daemon's agents have their own, got {risk:g}")
    if faults:
        fail("\n".join(faults), EXIT_MALFORMED)
    if traces:
        _show_traces(traces, RISK if risk is None else risk, plot, as_json)
    else:
        _show_live(daemon, job, plot, as_json)


def _show_traces(traces: list[Path], risk: float, plot: Path | None, as_json: bool) -> None:
    with reporting_errors():
        from orchestrrl.fabric.slack_traces import read_traces, study
        from planner.fabric.slack_summary import merged

        summaries, common = study(read_traces(traces), risk)
        summary = merged(summaries)
        if plot is not None:
            _draw(summary, plot)
    if as_json:
        print_json({"ranks": [each.to_json() for each in summaries], "common": _common_json(common)})
        return
    show(summary)
    show_common(common)
    others = [f"rank {each.ranks[0]}: {each.why_not}" for each in summaries[1:] if each.why_not]
    print_lines(others)


def _show_live(daemon: str, job: str | None, plot: Path | None, as_json: bool) -> None:
    async def conversation(client: "ControlClient") -> list[dict[str, Any]]:
        told = await client.call(client.fabric.GetSlack, fabric_pb2.GetSlackRequest())
        return list(json.loads(told.summary_json))

    from planner.fabric.slack_summary import SlackSummary, merged

    jobs: dict[str, list[SlackSummary]] = {}
    hosts: dict[str, set[str]] = {}
    seen = call_daemon(daemon, conversation)
    for host in seen:
        for rank in host["ranks"]:
            if job in (None, rank["job"]):
                jobs.setdefault(rank["job"], []).append(SlackSummary.from_json(rank["summary"]))
                hosts.setdefault(rank["job"], set()).add(host["host"])
    if not jobs:
        if others := sorted({rank["job"] for host in seen for rank in host["ranks"]}):
            fail(f"no job {job!r} is traced, but {', '.join(map(repr, others))}: name it with --job")
        of = "no job" if job is None else f"no job {job!r}"
        fail(f"{of} is traced: `orchestrrl agent --rings FOLDER` on its hosts tells the daemon of it")
    if plot is not None and len(jobs) > 1:
        fail(f"--plot: draws one job, choose it with --job: {', '.join(map(repr, sorted(jobs)))}", EXIT_MALFORMED)
    told = {name: sorted(ranks, key=lambda each: each.ranks) for name, ranks in sorted(jobs.items())}
    if as_json:
        print_json(
            {
                "jobs": [
                    {"job": name, "hosts": sorted(hosts[name]), "ranks": [each.to_json() for each in ranks]}
                    for name, ranks in told.items()
                ]
            }
        )
    for name, ranks in told.items():
        summary = merged(ranks)
        if plot is not None:
            _draw(summary, plot)
        if not as_json:
            where = ", ".join(sorted(hosts[name]))
            print_lines([f"[bold]job {escape(name or 'without a name')}[/bold], hosts: {escape(where)}", ""])
            show(summary)


def _draw(summary: "SlackSummary", target: Path) -> None:
    try:
        draw(summary, target)
    except OSError as error:
        fail(f"{target}: cannot be written: {error.strerror}")


def show(summary: "SlackSummary") -> None:
    """For people. Reads nothing but the summary, wherever it comes from."""
    show_operations(summary)
    show_positions(summary)
    show_devices(summary)


def show_operations(summary: "SlackSummary") -> None:
    most = max((histogram.total for histogram in summary.histograms.values()), default=1)
    print_table(
        f"Slack before each operation, {_ranks(summary)}",
        ("operation", "collectives", "p5", "p50", "p95", "none", ""),
        (
            (
                op,
                count(histogram.total),
                *(duration(histogram.quantile_s(q)) for q in (0.05, 0.5, 0.95)),
                percent(histogram.none / histogram.total if histogram.total else None),
                bar(histogram.total / most, BAR),
            )
            for op, histogram in sorted(summary.histograms.items())
        ),
        left=("",),
    )
    for op, histogram in sorted(summary.histograms.items()):
        decades: dict[int, int] = {}
        for index, number in histogram.bins.items():
            decades[index // 5] = decades.get(index // 5, 0) + number
        if decades:
            print_lines([f"[bold]{op}[/bold]", *_bars(decades), ""])


def _bars(halves: dict[int, int]) -> list[str]:
    """Half a power of ten to a line."""
    from planner.fabric.slack_histogram import edge_s

    most = max(halves.values())
    return [
        f"{duration(edge_s(5 * half)):>9} - {duration(edge_s(5 * half + 5)):<9} "
        f"{bar(halves.get(half, 0) / most, BAR)} {halves.get(half, 0):,}"
        for half in range(min(halves), max(halves) + 1)
    ]


def show_positions(summary: "SlackSummary") -> None:
    quiet = [position for position in summary.positions if position.samples]
    shown = sorted(quiet, key=lambda each: -(each.promised_s or 0.0))[:POSITIONS_SHOWN]
    several = len({position.group for position in summary.positions}) > 1
    changes = f", sequence changed {summary.relearned} times: {summary.reason}" if summary.relearned else ""
    print_table(
        f"Windows of an iteration, rank {summary.ranks[0]}: {summary.iterations} iterations of "
        f"{len(summary.positions)} collective{'' if len(summary.positions) == 1 else 's'}{changes}",
        ("before", "group", "size", "after mark", "opens at", "p5", "p50", "promised", "risk"),
        (_position_row(each, several) for each in sorted(shown, key=lambda each: each.position)),
        left=("after mark",),
        optional=("group", "after mark"),
    )
    lines = []
    if len(quiet) > len(shown):
        lines.append(f"The {len(shown)} longest of {len(quiet)} windows; --json prints all.")
    if summary.why_not:
        lines.append(f"Nothing is promised where the trace ends: {summary.why_not}.")
    print_lines(lines)


def _position_row(each: "PositionSummary", several_groups: bool) -> tuple[object, ...]:
    return (
        f"{each.position} {each.op}",
        _group(each.group) if several_groups else None,
        _size(each.size) if each.size >= 0 else "varies",
        each.mark or None,
        duration(each.offset_s),
        duration(each.p5_s),
        duration(each.p50_s),
        duration(each.promised_s),
        None if each.risk is None else f"{each.risk:.1%}",
    )


def _size(size_bytes: int) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= step:
            return f"{size_bytes / step:.3g} {unit}"
    return f"{size_bytes} B"


def _group(group: int) -> str:
    """Recorders number groups by a hash of 63 bits, of which the last ones tell them apart."""
    return str(group) if group < 1 << 16 else f"..{group & 0xFFFF:04x}"


def show_devices(summary: "SlackSummary") -> None:
    from planner.fabric.topology import DEVICES

    quiet = [position for position in summary.positions if position.samples]
    print_table(
        "Windows that cover a switch's own delay",
        ("switch", "delay", "windows", "of", "longest promised"),
        (
            (
                device.name,
                duration(device.reconfiguration_s),
                sum(position.covers(device.reconfiguration_s) for position in quiet),
                len(quiet),
                duration(max((position.promised_s or 0.0 for position in quiet), default=0.0)),
            )
            for device in DEVICES.values()
        ),
    )
    print_lines(["What a commit needs beside that delay (control, receivers, routes) comes on top.", ""])


def show_common(common: "CommonQuiet") -> None:
    print_table(
        f"Quiet on all {common.ranks} ranks together: {len(common.lengths_s)} windows, {percent(common.share)} of "
        f"{duration(common.span_s)}; p50 {duration(common.quantile_s(0.5))}, p95 {duration(common.quantile_s(0.95))}",
        ("switch", "delay", "windows that cover it", "their share of time"),
        (
            (device, duration(delay_s), count(common.covering(delay_s)), percent(common.share_covering(delay_s)))
            for device, delay_s in _delays().items()
        ),
    )


def _delays() -> dict[str, float]:
    from planner.fabric.topology import DEVICES

    return {device.name: device.reconfiguration_s for device in DEVICES.values()}


def _common_json(common: "CommonQuiet") -> dict[str, Any]:
    return {
        "ranks": common.ranks,
        "span_s": common.span_s,
        "quiet_s": sum(common.lengths_s),
        "windows": len(common.lengths_s),
        "p5_s": common.quantile_s(0.05),
        "p50_s": common.quantile_s(0.5),
        "p95_s": common.quantile_s(0.95),
        "covering": {device: common.covering(delay_s) for device, delay_s in _delays().items()},
    }


def _ranks(summary: "SlackSummary") -> str:
    return f"rank {summary.ranks[0]}" if len(summary.ranks) == 1 else f"{len(summary.ranks)} ranks"


def draw(summary: "SlackSummary", target: Path) -> None:
    """Shares of each operation by its slack, and the delays of the switches. Raises OSError."""
    from orchestrrl.core.charts import axes, save
    from planner.fabric.slack_histogram import edge_s

    rows = [(op, histogram) for op, histogram in sorted(summary.histograms.items()) if histogram.bins]
    figure, panels = axes(max(1, len(rows)), width=8, height=1.2 + 1.3 * max(1, len(rows)), sharex=True)
    for [axis], (op, histogram) in zip(panels, rows, strict=False):
        indices = sorted(histogram.bins)
        shares = [100 * histogram.bins[index] / histogram.total for index in indices]
        widths = [edge_s(index + 1) - edge_s(index) for index in indices]
        axis.bar([edge_s(index) for index in indices], shares, widths, align="edge")
        axis.set(ylabel="%")
        axis.set_title(f"{op}: {histogram.total:,} collectives", loc="left", fontsize="small")
        for delay_s in _delays().values():
            axis.axvline(delay_s, color="grey", linewidth=0.8, linestyle=":")
    panels[-1][0].set(xscale="log", xlabel="seconds without traffic before it (dotted: delays of optical switches)")
    save(figure, target)
