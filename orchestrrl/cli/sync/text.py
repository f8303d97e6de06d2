"""Render weight syncs as text and tables: progress, outcomes, and the time of each phase."""

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

NONE_YET = "No version has been published yet: a trainer publishes one, see `orchestrrl sync peer --help`."
NO_PEERS = "No peer is attached: run `orchestrrl sync peer` on each host of the trainer and of engines."
GOES_ON = "the sync continues; abort it with [bold]orchestrrl sync abort[/bold]"
BAR_COLUMNS = 24
LATE_SHOWN = 4
EDGES_SHOWN = 8
PATH_SHARE = 0.01  # stretches below this share of the total time are not shown

COLOURS = {SyncState.DONE: "green", SyncState.ABORTED: "red", SyncState.SUPERSEDED: "yellow"}


# --- progress


def status_lines(status: WeightsStatus, now_s: float) -> list[str]:
    version = "no version committed yet" if status.committed is None else f"version {status.committed}"
    lines = [f"weights of the fleet: [bold]{version}[/bold]"]
    if status.sync is not None:
        lines += standing(status.sync, now_s)
    lines += [
        f"[red]quarantined[/red] {escape(engine.engine)}: {escape(engine.detail or 'no reason given')}"
        for engine in status.quarantined
    ]
    return lines


def standing(report: SyncReport, now_s: float) -> list[str]:
    """Return lines about the phase, the progress and the stragglers of a running sync, or about the outcome of an ended
    sync."""
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
    """Return a line about a running sync, such as `version 8 (sync-8): carrying, phase A for 3.2 s, attempt 2`."""
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
    """Return a line with a progress bar and the number of bytes that have arrived over all edges."""
    mended = f", {report.mended_edges} of {report.edges} edges failed and were replaced" if report.mended_edges else ""
    over = f"over {report.edges} edges ({size(report.bytes)} of weights){mended}"
    if not report.carried_bytes:
        return f"{size(report.arrived_bytes)} arrived {over}"
    share = min(1.0, report.arrived_bytes / report.carried_bytes)
    return f"{bar(share, BAR_COLUMNS)} {percent(share)} of {size(report.carried_bytes)} {over}"


def late_text(report: SyncReport) -> str:
    """Return the late ranks or engines, for which the sync waits, as text. Return an empty string if none is late."""
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
    names = [f"{engine.engine}{f' ({engine.detail})' if engine.detail else ''}" for engine in late[:LATE_SHOWN]]
    more = f" and {len(late) - LATE_SHOWN} more" if len(late) > LATE_SHOWN else ""
    return f"late: {', '.join(names)}{more}"


def outcome(report: SyncReport) -> str:
    """Return a line about the outcome of a sync, such as `version 7 (sync-7): done in 4 s: 2 engines have it`."""
    took = profile(report)
    colour = "yellow" if report.code == "some_quarantined" else COLOURS.get(report.state, "cyan")
    code = "" if report.code in ("", report.state) else f" ({escape(report.code)})"
    why = f": {escape(report.detail)}" if report.detail else ""
    return f"{named(report)}: [{colour}]{report.state}[/{colour}]{code} in {duration(took.whole_s)}{why}"


def news(before: SyncReport | None, report: SyncReport) -> Iterator[str]:
    """Yield a line with rich markup for each change since the report `before`, or since the start if `before` is
    None."""
    if report.over:
        yield outcome(report)
        return
    now_s = time.time()
    if before is None or before.state is not report.state or before.attempt != report.attempt:
        yield f"{time_of_day(now_s)} {progress(report, now_s)}"
    known = set() if before is None else set(before.notes)
    yield from (escape(note) for note in report.notes if note not in known)


def picture(report: SyncReport) -> Text:
    """Return the state of the sync for display in a terminal. The display is refreshed while the sync runs."""
    return Text.from_markup("\n".join(standing(report, time.time())), overflow="fold")


def failure(report: SyncReport) -> str | None:
    """Return an error message for a sync that did not succeed, or None if every engine has the version."""
    if is_well(report):
        return None
    return f"version {report.version} is {report.state}: {report.detail or report.code or 'no reason given'}"


def is_well(report: SyncReport) -> bool:
    """Return whether the sync is done and every engine of the fleet has the version."""
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
        "outcome": lambda report: (
            report.state if report.code in ("", report.state) else f"{report.state}: {report.code}"
        ),
        "took": of_profile(lambda took: duration(took.whole_s)),
        "transfer": of_profile(lambda took: duration(took.transfer_s or None)),
        "install": of_profile(lambda took: duration(took.seconds(SyncPhase.INSTALL) or None)),
        "paused": of_profile(lambda took: duration(took.still_s or None)),
        "GB": lambda report: f"{report.bytes / 1e9:,.3g}",
        "/ estimate": of_profile(lambda took: times(took.over_estimate)),
        "/ bound": of_profile(lambda took: times(took.over_bound)),
        "engines": lambda report: (
            f"{sum(engine.state is EngineSync.SERVES for engine in report.engines)} of {len(report.engines)}"
        ),
    }
    return table("Versions", columns, reports)


def phases_table(title: str, profiles: Sequence[SyncProfile]) -> Table:
    """Return a table with a row for each phase. A row contains the duration of the phase and its share of the critical
    path. For several profiles, it contains the median and the longest duration."""
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
        share_cells = ("off path", "") if phase in BESIDE else (percent(share), bar(share, BAR_COLUMNS).rstrip())
        return phase_text(phase), duration(median(seconds for seconds, *_ in rows)), *longest, *share_cells

    shown = ((p, rows) for p, rows in took.items() if rows and (p is not None or shares[None] >= PATH_SHARE))
    columns = ("phase", "median" if several else "seconds", "longest", "of version", "share", "")
    return cells_table(title, columns, (cells(*each) for each in shown))


# --- profile


def profile_lines(profile: SyncProfile) -> list[str]:
    report = profile.report
    lines = [
        f"{outcome(report) if report.over else progress(report, report.began_s + profile.whole_s)}",
        f"critical path: {path_text(profile) or 'empty so far'}",
    ]
    if profile.transfer_s:
        lines.append(transfer_text(profile))
    if profile.still_s:
        lines.append(f"requests were paused for {duration(profile.still_s)}")
    return [*lines, *(escape(note) for note in report.notes)]


def transfer_text(profile: SyncProfile) -> str:
    """Return a line about the transfer of a sync, such as `transfer: 2 s, 50 % of the total, 16 Gb/s over all edges;
    ...`."""
    report = profile.report
    rate = f", {profile.carried_gbps:.3g} Gb/s over all edges" if profile.carried_gbps else ""
    against = [
        f"{times(over)} x {what} of {duration(of_s)}"
        for over, what, of_s in (
            (profile.over_estimate, "the estimate", report.estimate_s),
            (profile.over_bound, "the bound", report.lower_bound_s),
        )
        if over is not None
    ]
    if report.naive_s:
        against.append(f"directly from the trainer {duration(report.naive_s)}")
    comparison = f"; {', '.join(against)}" if against else ""
    return f"transfer: {duration(profile.transfer_s)}, {percent(profile.transfer_share)} of the total{rate}{comparison}"


def path_text(profile: SyncProfile) -> str:
    """Return the phases of the critical path in chronological order, such as `gather 500 ms, phase A 2 s`. Short phases
    are omitted."""
    stretches: list[tuple[SyncPhase | None, float]] = []
    for stretch in profile.path:
        if stretch.phase in BESIDE or stretch.seconds < PATH_SHARE * profile.whole_s:
            continue
        if stretches and stretches[-1][0] is stretch.phase:
            stretches[-1] = stretch.phase, stretches[-1][1] + stretch.seconds
        else:
            stretches.append((stretch.phase, stretch.seconds))
    return ", ".join(f"{phase_text(phase)} {duration(seconds)}" for phase, seconds in stretches)


def advice_lines(profiles: Sequence[SyncProfile]) -> list[str]:
    """Return one line for each kind of advice. The line contains the advice for the newest sync to which this kind
    applies, and the number of syncs to which it applies."""
    found: dict[str, list[Advice]] = {}
    for took in profiles:
        for each in advice(took):
            found.setdefault(each.code, []).append(each)
    by_seconds = sorted(found.values(), key=lambda each: -sum(one.seconds for one in each))
    return [
        f"[yellow]advice[/yellow]{f' ({len(each)} of {len(profiles)})' if len(profiles) > 1 else ''}:"
        f" {escape(each[0].text)}"
        for each in by_seconds
    ]


def times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"
