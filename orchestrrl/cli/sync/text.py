"""Weight syncs in words and tables: how one stands, what became of versions, where the time of one went."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrrl.cli.formats import UNKNOWN, bar, duration, percent, ranges, size, time_of_day
from orchestrrl.cli.output import Columns, cells_table, table
from orchestrrl.weights.controller.advice import Advice, advice
from orchestrrl.weights.controller.profile import BESIDE, SyncProfile, phase_text, profile
from orchestrrl.weights.controller.reports import (
    EngineSync,
    SyncPhase,
    SyncReport,
    SyncState,
    WeightsStatus,
)

NONE_YET = "No version was carried out yet: a trainer publishes one, see `orchestrrl sync peer --help`."
NO_PEERS = "No peer is attached: `orchestrrl sync peer` runs on each host of the trainer and of engines."
GOES_ON = "it goes on by itself; end it with [bold]orchestrrl sync abort[/bold]"
BAR_COLUMNS = 24
LATE_SHOWN = 4
EDGES_SHOWN = 8
PATH_SHARE = 0.01  # of the whole, below which a stretch is not told

COLOURS = {SyncState.DONE: "green", SyncState.ABORTED: "red", SyncState.SUPERSEDED: "yellow"}


# --- how one stands


def status_lines(status: WeightsStatus, now_s: float) -> list[str]:
    version = "no version was committed yet" if status.committed is None else f"version {status.committed}"
    lines = [f"weights of the fleet: [bold]{version}[/bold]"]
    if status.sync is not None:
        lines += standing(status.sync, now_s)
    lines += [
        f"[red]quarantined[/red] {escape(engine.engine)}: {escape(engine.detail or 'no reason given')}"
        for engine in status.quarantined
    ]
    return lines


def standing(report: SyncReport, now_s: float) -> list[str]:
    """A few lines: what it does, how far it is, who is late."""
    if report.over:
        return [f"last: {outcome(report)}"]
    lines = [progress(report, now_s)]
    if report.state is SyncState.CARRYING:
        lines.append(arrived(report))
    if late := late_text(report):
        lines.append(escape(late))
    lines += [escape(note) for note in report.notes[-LATE_SHOWN:]]
    return lines


def progress(report: SyncReport, now_s: float) -> str:
    """`version 8 (sync-8): carrying, phase A for 3.2 s, attempt 2`"""
    lasting = [took for took in report.phases if took.ended_s is None]
    doing = (
        f", {phase_text(lasting[-1].phase)} for {duration(max(0.0, now_s - lasting[-1].began_s))}" if lasting else ""
    )
    again = f", attempt {report.attempt}" if report.attempt > 1 else ""
    why = f": {escape(report.detail)}" if report.detail else ""
    return f"{named(report)}: [cyan]{report.state}[/cyan]{doing}{again}{why}"


def named(report: SyncReport) -> str:
    return f"version [bold]{report.version}[/bold] ({escape(report.id)})"


def arrived(report: SyncReport) -> str:
    """A bar, and bytes over all edges."""
    mended = f", {report.mended_edges} of {report.edges} edges broke and were replaced" if report.mended_edges else ""
    over = f"over {report.edges} edges ({size(report.bytes)} of weights){mended}"
    if not report.carried_bytes:
        return f"{size(report.arrived_bytes)} have arrived, {over}"
    share = min(1.0, report.arrived_bytes / report.carried_bytes)
    return f"{bar(share, BAR_COLUMNS)} {percent(share)} of {size(report.carried_bytes)} {over}"


def late_text(report: SyncReport) -> str:
    """Who is waited for; empty where nobody is."""
    if report.state is SyncState.PUBLISHING:
        missing = sorted(set(range(report.world)) - set(report.published))
        return f"not published yet: ranks {ranges(missing)} of {report.world}" if missing else ""
    want = {
        SyncState.CARRYING: EngineSync.WAITING,
        SyncState.INSTALLING: EngineSync.PREPARED,
        SyncState.VERIFYING: EngineSync.INSTALLED,
    }.get(report.state)
    late = [engine for engine in report.engines if engine.state is want]
    if not late or len(late) == len(report.engines) > 1:
        return ""
    told = [f"{engine.engine}{f' ({engine.detail})' if engine.detail else ''}" for engine in late[:LATE_SHOWN]]
    more = f" and {len(late) - LATE_SHOWN} more" if len(late) > LATE_SHOWN else ""
    return f"late: {', '.join(told)}{more}"


def outcome(report: SyncReport) -> str:
    """`version 7 (sync-7): done in 4 s: 2 engines have it`"""
    took = profile(report)
    colour = "yellow" if report.code == "some_quarantined" else COLOURS.get(report.state, "cyan")
    code = "" if report.code in ("", report.state) else f" ({escape(report.code)})"
    why = f": {escape(report.detail)}" if report.detail else ""
    return f"{named(report)}: [{colour}]{report.state}[/{colour}]{code} in {duration(took.whole_s)}{why}"


def news(before: SyncReport | None, report: SyncReport) -> Iterator[str]:
    """Yield what has changed since, a line each, for a pipe."""
    if report.over:
        yield outcome(report)
        return
    now_s = time.time()
    if before is None or before.state is not report.state or before.attempt != report.attempt:
        yield f"{time_of_day(now_s)} {progress(report, now_s)}"
    known = set() if before is None else set(before.notes)
    yield from (escape(note) for note in report.notes if note not in known)


def picture(report: SyncReport) -> Text:
    """For a terminal, renewed while it runs."""
    return Text.from_markup("\n".join(standing(report, time.time())), overflow="fold")


def failure(report: SyncReport) -> str | None:
    """Return why the command that followed it fails; None where the version is the fleet's, on all of it."""
    if is_well(report):
        return None
    return f"version {report.version} is {report.state}: {report.detail or report.code or 'no reason given'}"


def is_well(report: SyncReport) -> bool:
    """The version is the fleet's, on all of it."""
    return report.state is SyncState.DONE and report.code != "some_quarantined"


# --- rows


PEER_COLUMNS: Columns = {
    "peer": "id",
    "role": "role",
    "host": "host",
    "PoD": "pod",
    "ToR": "tor",
    "engines": lambda peer: ", ".join([*peer.engines, *(f"{engine} (other ranks)" for engine in peer.ranks_of)]),
    "versions": lambda peer: ranges(sorted(peer.versions)),
    "": lambda peer: "attached" if peer.attached else "gone",
}
ENGINE_COLUMNS: Columns = {
    "engine": "engine",
    "state": "state",
    "installed in": lambda engine: duration(engine.install_s or None),
    "remark": "detail",
}
EDGE_COLUMNS: Columns = {
    "slowest edges": lambda edge: f"{edge.src} -> {edge.dst}",
    "phase": "phase",
    "GB": lambda edge: f"{edge.bytes / 1e9:,.3g}",
    "seconds": lambda edge: duration(edge.seconds),
    "planned": lambda edge: duration(edge.planned_s),
    "Gb/s": lambda edge: f"{edge.gbps:.3g}",
}


def history_table(reports: Sequence[SyncReport], now_s: float) -> Table:
    def of_profile(text: Callable[[SyncProfile], str]) -> Callable[[SyncReport], str]:
        return lambda report: text(profile(report, now_s))

    columns: Columns = {
        "version": "version",
        "published": lambda report: time_of_day(report.began_s),
        "became": lambda report: (
            report.state if report.code in ("", report.state) else f"{report.state}: {report.code}"
        ),
        "took": of_profile(lambda took: duration(took.whole_s)),
        "transfer": of_profile(lambda took: duration(took.transfer_s or None)),
        "install": of_profile(lambda took: duration(took.seconds(SyncPhase.INSTALL) or None)),
        "stood still": of_profile(lambda took: duration(took.still_s or None)),
        "GB": lambda report: f"{report.bytes / 1e9:,.3g}",
        "x estimate": of_profile(lambda took: times(took.over_estimate)),
        "x bound": of_profile(lambda took: times(took.over_bound)),
        "engines": lambda report: (
            f"{sum(engine.state is EngineSync.SERVES for engine in report.engines)} of {len(report.engines)}"
        ),
    }
    return table("Versions", columns, reports)


def phases_table(title: str, profiles: Sequence[SyncProfile]) -> Table:
    """A phase a row: its seconds, of several versions the median and the longest, and its share of all their time."""
    whole_s, several = sum(each.whole_s for each in profiles), len(profiles) > 1
    took: dict[SyncPhase | None, list[tuple[float, int, float]]] = {phase: [] for phase in (*SyncPhase, None)}
    for each in profiles:
        for row in each.rows:
            took[row.phase].append((row.seconds, each.report.version, row.waited_s))
        took[None].append((each.unnamed_s, each.report.version, each.unnamed_s))
    shares = {p: sum(waited_s for *_, waited_s in rows) / whole_s if whole_s > 0 else 0.0 for p, rows in took.items()}

    def cells(phase: SyncPhase | None, rows: list[tuple[float, int, float]]) -> tuple[object, ...]:
        longest_s, version, _ = max(rows, key=lambda row: row[0])
        longest = (duration(longest_s), version) if several else (None, None)
        share = shares[phase]
        told = ("beside", "") if phase in BESIDE else (percent(share), bar(share, BAR_COLUMNS).rstrip())
        return phase_text(phase), duration(median(seconds for seconds, *_ in rows)), *longest, *told

    shown = ((p, rows) for p, rows in took.items() if rows and (p is not None or shares[None] >= PATH_SHARE))
    columns = ("phase", "median" if several else "seconds", "longest", "of version", "share", "")
    return cells_table(title, columns, (cells(*each) for each in shown))


# --- where the time went


def profile_lines(profile: SyncProfile) -> list[str]:
    report = profile.report
    lines = [
        f"{outcome(report) if report.over else progress(report, report.began_s + profile.whole_s)}",
        f"waited for: {path_text(profile) or 'nothing yet'}",
    ]
    if profile.transfer_s:
        lines.append(transfer_text(profile))
    if profile.still_s:
        lines.append(f"requests stood still for {duration(profile.still_s)}")
    return [*lines, *(escape(note) for note in report.notes)]


def transfer_text(profile: SyncProfile) -> str:
    """`transfer: 2 s, 50 % of the whole, 16 Gb/s over all edges; 1.11 x its estimate, 1.25 x the bound, ...`"""
    report = profile.report
    rate = f", {profile.carried_gbps:.3g} Gb/s over all edges" if profile.carried_gbps else ""
    against = [
        f"{times(over)} x {what} of {duration(of_s)}"
        for over, what, of_s in (
            (profile.over_estimate, "its estimate", report.estimate_s),
            (profile.over_bound, "the bound", report.lower_bound_s),
        )
        if over is not None
    ]
    if report.naive_s:
        against.append(f"straight from the trainer {duration(report.naive_s)}")
    told = f"; {', '.join(against)}" if against else ""
    return f"transfer: {duration(profile.transfer_s)}, {percent(profile.transfer_share)} of the whole{rate}{told}"


def path_text(profile: SyncProfile) -> str:
    """`gather 500 ms, phase A 2 s, install 1 s`: one after the other; trifles are left out."""
    told: list[tuple[SyncPhase | None, float]] = []
    for stretch in profile.path:
        if stretch.phase in BESIDE or stretch.seconds < PATH_SHARE * profile.whole_s:
            continue
        if told and told[-1][0] is stretch.phase:
            told[-1] = stretch.phase, told[-1][1] + stretch.seconds
        else:
            told.append((stretch.phase, stretch.seconds))
    return ", ".join(f"{phase_text(phase)} {duration(seconds)}" for phase, seconds in told)


def advice_lines(profiles: Sequence[SyncProfile]) -> list[str]:
    """Of the newest that it concerns, each kind once; of several, with how many it concerns."""
    found: dict[str, list[Advice]] = {}
    for took in profiles:
        for each in advice(took):
            found.setdefault(each.code, []).append(each)
    told = sorted(found.values(), key=lambda each: -sum(one.seconds for one in each))
    return [
        f"[yellow]advice[/yellow]{f' ({len(each)} of {len(profiles)})' if len(profiles) > 1 else ''}:"
        f" {escape(each[0].text)}"
        for each in told
    ]


def times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"
