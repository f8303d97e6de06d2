"""`orchestrrl fabric slack` and `trace`: analyse the slack between collectives, and export recorded events."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import DaemonOption, call_daemon, command
from orchestrrl.cli.formats import bar, count, duration, percent, size
from orchestrrl.cli.lazy import ControlClient, fabric_pb2
from orchestrrl.cli.output import EXIT_MALFORMED, Columns, Output, View, cells_table, fail, raise_faults, table, writing
from orchestrrl.core.addresses import DEFAULT_TARGET

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrrl.fabric.traces import CommonQuiet
    from planner.fabric.slack_summary import SlackSummary

POSITIONS_SHOWN = 24  # number of longest windows to print; --json prints all
BAR = 24
RISK = 0.05
PICTURES = (".png", ".svg", ".pdf")


@command
def slack(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE.jsonl...", help="Trace files. Default: the running jobs that the daemon traces."),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Probability, 0 to 1, that a window is shorter than promised.", show_default="0.05"),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Show only this running job.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the distributions to a .png, .svg or .pdf file.")] = None,
    daemon: DaemonOption = DEFAULT_TARGET,
) -> Output:
    """Show the slack between the collectives of a job, and which optical switches can change circuits within the slack.

    The data are taken from trace files or, by default, from the agents on the hosts of running jobs. Each line of a
    trace is one JSON object: a collective (`rank`, `op`, `group`, `bytes`, `start_s`, `end_s`, `async`), a mark
    (`rank`, `mark`, `at_s`) or the start of an iteration (`rank`, `iteration`, `at_s`). The command prints the slack
    before each operation, and the windows of an iteration with the lengths that can be promised. For traces, it also
    prints the windows in which all ranks are quiet.

    Example:

        orchestrrl fabric slack trace.jsonl

        orchestrrl fabric slack --job trainer --plot slack.svg

        orchestrrl fabric slack rank0.jsonl rank1.jsonl --risk 0.01 --plot slack.svg
    """
    faults = []
    if risk is not None and not 0 < risk < 1:
        faults.append(f"--risk: must be > 0 and < 1, got {risk:g}")
    if plot is not None and plot.suffix not in PICTURES:
        faults.append(f"--plot: must end in {', '.join(PICTURES)}, got {str(plot)!r}")
    if traces and job is not None:
        faults.append(f"--job: cannot be combined with TRACE.jsonl, got {job!r}")
    if not traces and risk is not None:
        faults.append(f"--risk: requires TRACE.jsonl; agents have their own setting, got {risk:g}")
    raise_faults(faults)
    return _of_traces(traces, RISK if risk is None else risk, plot) if traces else _of_jobs(daemon, job, plot)


def _of_traces(traces: list[Path], risk: float, plot: Path | None) -> Output:
    from orchestrrl.fabric.traces import read_traces, study
    from planner.fabric.slack_summary import merged

    summaries, common = study(read_traces(traces), risk)
    summary = merged(summaries)
    if plot is not None:
        draw(summary, plot)
    document = {"ranks": list(map(asdict, summaries)), "common": _common_json(common)}
    others = [f"rank {each.ranks[0]}: {each.why_not}" for each in summaries[1:] if each.why_not]
    return Output(document, [*_view(summary), _common_table(common), *others])


def _of_jobs(daemon: str, job: str | None, plot: Path | None) -> Output:
    async def conversation(client: ControlClient) -> list[dict[str, Any]]:
        response = await client.call(client.fabric.GetSlack, fabric_pb2.GetSlackRequest())
        return list(json.loads(response.summary_json))

    from pydantic import TypeAdapter

    from planner.fabric.slack_summary import SlackSummary, merged

    as_summary = TypeAdapter(SlackSummary)
    jobs: dict[str, list[SlackSummary]] = {}
    hosts: dict[str, set[str]] = {}
    seen = call_daemon(daemon, conversation)
    for host in seen:
        for rank in host["ranks"]:
            if job in (None, rank["job"]):
                jobs.setdefault(rank["job"], []).append(as_summary.validate_python(rank["summary"]))
                hosts.setdefault(rank["job"], set()).add(host["host"])
    if not jobs:
        if others := sorted({rank["job"] for host in seen for rank in host["ranks"]}):
            fail(f"no job {job!r} is traced; traced jobs: {', '.join(map(repr, others))}")
        of = "no job" if job is None else f"no job {job!r}"
        fail(f"{of} is traced: run `orchestrrl agent --rings FOLDER` on its hosts")
    if plot is not None and len(jobs) > 1:
        fail(f"--plot: requires --job to select one of {', '.join(map(repr, sorted(jobs)))}", EXIT_MALFORMED)
    by_name = {name: sorted(ranks, key=lambda each: each.ranks) for name, ranks in sorted(jobs.items())}
    summaries = {name: merged(ranks) for name, ranks in by_name.items()}
    document = [
        {"job": name, "hosts": sorted(hosts[name]), "ranks": list(map(asdict, ranks))}
        for name, ranks in by_name.items()
    ]
    if plot is not None:
        draw(next(iter(summaries.values())), plot)
    return Output({"jobs": document}, _jobs_view(summaries, hosts))


def _jobs_view(summaries: "dict[str, SlackSummary]", hosts: dict[str, set[str]]) -> View:
    for name, summary in summaries.items():
        where = ", ".join(sorted(hosts[name]))
        yield f"[bold]job {escape(name or 'without a name')}[/bold], hosts: {escape(where)}"
        yield ""
        yield from _view(summary)


def _view(summary: "SlackSummary") -> View:
    """Yield the tables and charts of a summary, which may come from a trace or from the daemon."""
    most = max((histogram.total for histogram in summary.histograms.values()), default=1)
    yield cells_table(
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
    )
    for op, histogram in sorted(summary.histograms.items()):
        halves: dict[int, int] = {}
        for index, number in histogram.bins.items():
            halves[index // 5] = halves.get(index // 5, 0) + number
        if halves:
            yield from (f"[bold]{op}[/bold]", *_bars(halves), "")
    yield from _windows_view(summary)
    yield from ("The other times of a commit (control, receivers, routes) are not included in that delay.", "")


def _bars(halves: dict[int, int]) -> list[str]:
    """Return a bar chart of slack as lines of text. Each line covers half a power of ten. `halves` maps the index of
    each such interval to its number of collectives."""
    from planner.fabric.slack import edge_s

    most = max(halves.values())
    return [
        f"{duration(edge_s(5 * half)):>9} - {duration(edge_s(5 * half + 5)):<9} "
        f"{bar(halves.get(half, 0) / most, BAR)} {halves.get(half, 0):,}"
        for half in range(min(halves), max(halves) + 1)
    ]


def _windows_view(summary: "SlackSummary") -> View:
    quiet = [position for position in summary.positions if position.samples]
    shown = sorted(quiet, key=lambda each: -(each.promised_s or 0.0))[:POSITIONS_SHOWN]
    several = len({position.group for position in summary.positions}) > 1
    changes = f", sequence changed {summary.relearned} times: {summary.reason}" if summary.relearned else ""
    columns: Columns = {
        "before": lambda each: f"{each.position} {each.op}",
        "group": lambda each: _group(each.group) if several else None,
        "size": lambda each: size(each.size) if each.size >= 0 else "varies",
        "after mark": "mark",
        "opens at": lambda each: duration(each.offset_s),
        "p5": lambda each: duration(each.p5_s),
        "p50": lambda each: duration(each.p50_s),
        "promised": lambda each: duration(each.promised_s),
        "risk": lambda each: None if each.risk is None else f"{each.risk:.1%}",
    }
    yield table(
        f"Windows of an iteration, rank {summary.ranks[0]}: {summary.iterations} iterations of "
        f"{len(summary.positions)} collective{'' if len(summary.positions) == 1 else 's'}{changes}",
        columns,
        sorted(shown, key=lambda each: each.position),
    )
    if len(quiet) > len(shown):
        yield f"The {len(shown)} longest of {len(quiet)} windows; --json prints all."
    if summary.why_not:
        yield f"No window is promised at the end of the trace: {summary.why_not}."
    longest = duration(max((position.promised_s or 0.0 for position in quiet), default=0.0))
    yield cells_table(
        "Windows longer than a switch's delay",
        ("switch", "delay", "windows", "of", "longest promised"),
        (
            (name, duration(delay_s), sum(each.covers(delay_s) for each in quiet), len(quiet), longest)
            for name, delay_s in _delays().items()
        ),
    )


def _group(group: int) -> str:
    """Return a short name of a communication group. Of the 63-bit hashes that recorders use, the last 16 bits are
    shown."""
    return str(group) if group < 1 << 16 else f"..{group & 0xFFFF:04x}"


def _common_table(common: "CommonQuiet") -> "Table":
    return cells_table(
        f"Quiet on all {common.ranks} ranks together: {len(common.lengths_s)} windows, {percent(common.share)} of "
        f"{duration(common.span_s)}; p50 {duration(common.quantile_s(0.5))}, p95 {duration(common.quantile_s(0.95))}",
        ("switch", "delay", "windows longer than it", "share of time"),
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
    """Plot the distribution of slack before each operation, with the delays of the optical switches, to the file
    `target`."""
    from orchestrrl.core.charts import axes, save
    from planner.fabric.slack import edge_s

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
    panels[-1][0].set(xscale="log", xlabel="slack before the operation in s (dotted: delays of optical switches)")
    with writing(target):
        save(figure, target)


@command
def trace(
    target: Annotated[Path, typer.Argument(help="The trace file to write or replace.", metavar="FILE.jsonl")],
    rings: Annotated[
        Path | None, typer.Option(help="Folder of the recorders. Default: the recorders' default.", metavar="FOLDER")
    ] = None,
    job: Annotated[str | None, typer.Option(help="The job to export. Required if there are several.")] = None,
) -> Output:
    """Write the collectives and marks in this host's recorder buffers to a trace file.

    Each buffer holds the latest events of one process. The job continues to run. `orchestrrl fabric slack` reads the
    trace files of one or several hosts. Times are in Unix time.

    Example: `orchestrrl fabric trace rank0.jsonl --job trainer && orchestrrl fabric slack rank0.jsonl`
    """
    from orchestrrl.fabric.traces import read_rings, recorded_jobs, write_trace
    from orchestrrl.integrations.instrument.rings import DEFAULT_DIRECTORY

    folder = DEFAULT_DIRECTORY if rings is None else rings
    jobs = recorded_jobs(folder)
    if job is None:
        if len(jobs) > 1:
            fail(f"--job: is required to select one of {', '.join(map(repr, jobs))}", EXIT_MALFORMED)
        job = next(iter(jobs), "")
    elif jobs and job not in jobs:
        fail(f"{folder}: no job {job!r} is recorded; recorded jobs: {', '.join(map(repr, jobs))}")
    found = read_rings(folder, job)
    with writing(target):
        write_trace(found.events, target)
    counts = {"events": len(found.events), "lost": found.lost, "running": found.running}
    document = {"file": str(target), "job": job, "ranks": sorted(found.ranks), **counts}
    lines = [f"{target}: {len(found.events):,} events of {len(found.ranks)} ranks"]
    if found.lost:
        lines.append(f"{found.lost:,} older events were overwritten: the size of rings is limited")
    if found.running:
        lines.append(f"{found.running:,} collectives that still run are omitted")
    return Output(document, lines)
