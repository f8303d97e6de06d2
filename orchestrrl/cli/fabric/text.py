"""How the circuits of a running daemon are told to people: periods, windows, routes, traced hosts."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape

from orchestrrl.cli.fleet.status import name_of_period
from orchestrrl.cli.formats import duration, time_of_day
from orchestrrl.cli.output import print_lines, print_table, stdout

CIRCUITS_SHOWN = 40
REASONS_SHOWN = 8
PAIRS_SHOWN = 6
WINDOW_COLUMNS = 20
NARROW_WINDOW_COLUMNS = 10  # where a row with the longest of reasons would not fit on a line else
WIDE_COLUMNS = 110
NO_PERIODS = "No period was announced yet: a trainer does, or `orchestrrl fabric announce PERIOD --intent FILE`."


def show_circuits(circuits: Sequence[dict[str, Any]]) -> None:
    if not circuits:
        print_lines(["No circuits are up.", ""])
        return
    rows = [(each["pod"] or "core", each["a"], each["b"], each["count"]) for each in circuits[:CIRCUITS_SHOWN]]
    title = f"Circuits: {sum(each['count'] for each in circuits)}"
    print_table(title, ("where", "from", "to", "circuits"), rows, left=("from", "to"))
    if len(circuits) > CIRCUITS_SHOWN:
        print_lines([f"and between {len(circuits) - CIRCUITS_SHOWN} other pairs: --json has all", ""])


def show_switch_times(times: Iterable[dict[str, Any]]) -> None:
    print_table(
        "What a change of circuits takes",
        ("switch", "expected", "changes measured"),
        [(each["switch_id"], duration(each["usable_s"]), each["samples"]) for each in times],
    )


def show_hosts(hosts: Sequence[dict[str, Any]]) -> None:
    if not hosts:
        print_lines(["No host tells of windows: `orchestrrl agent --rings FOLDER` on those that train does."])
        return
    print_table(
        "Traced hosts",
        ("host", "ranks", "clock", "agent", "no window now, because"),
        map(_host_row, hosts),
        left=("ranks", "clock", "agent", "no window now, because"),
    )


def _host_row(host: dict[str, Any]) -> tuple[object, ...]:
    ranks = ", ".join(f"{len(job['ranks'])}{' of ' + job['job'] if job['job'] else ''}" for job in host["jobs"])
    clock = f"within {duration(host['bound_s'])}" if host["bound_s"] else None
    return host["host"], ranks or None, clock, "attached" if host["attached"] else "gone", _no_window(host)


def _no_window(host: dict[str, Any]) -> str | None:
    if not host["attached"]:
        return "its agent is gone"
    return host["detail"] or (None if host["jobs"] else "no recorder runs on it")


def show_periods(periods: Sequence[dict[str, Any]]) -> None:
    if not periods:
        print_lines([NO_PERIODS])
        return
    print_table(
        "Periods",
        ("announced", "period", "became", "moves", "waited", "took", "window", "commit"),
        map(_period_row, periods),
        left=("period", "became", "commit"),
        optional=("window", "commit"),
    )
    print_lines(escape(line) for line in reasons(periods))


def show_counts(counts: Sequence[dict[str, Any]]) -> None:
    if not counts:
        return
    print_table(
        "All that ended so far",
        ("state", "why", "periods"),
        [(each["state"], _why(each), each["count"]) for each in counts],
        left=("why",),
    )


def reasons(periods: Iterable[dict[str, Any]]) -> list[str]:
    """In words, each once, the newest first."""
    found: dict[tuple[str, str], str] = {}
    for period in periods:
        if period["detail"]:
            line = f"{time_of_day(period['announced_unix_s'])} {name_of_period(period)}: {period['detail']}"
            found.setdefault((name_of_period(period), period["code"]), line)
    lines = list(found.values())
    more = [f"and {len(lines) - REASONS_SHOWN} other reasons: --json has all"] if len(lines) > REASONS_SHOWN else []
    return [*lines[:REASONS_SHOWN], *more, ""] if lines else []


def _period_row(period: dict[str, Any]) -> tuple[object, ...]:
    commits = period["commits"]
    first = commits[0] if commits else None
    windowed = first if first is not None and first["window_until_unix_s"] > 0 else None
    return (
        time_of_day(period["announced_unix_s"]),
        name_of_period(period),
        period["state"] + (f": {why}" if (why := _why(period)) else ""),
        _moves(period),
        duration(first["commanded_unix_s"] - period["announced_unix_s"]) if first else None,
        duration(sum(each["usable_unix_s"] - each["commanded_unix_s"] for each in commits)) if first else None,
        duration(windowed["window_until_unix_s"] - windowed["window_opened_unix_s"]) if windowed else None,
        in_window(windowed, WINDOW_COLUMNS if stdout().width >= WIDE_COLUMNS else NARROW_WINDOW_COLUMNS)
        if windowed
        else None,
    )


def _moves(period: dict[str, Any]) -> str:
    """Those made, where they are not all."""
    made = sum(each["moves"] for each in period["commits"] if each["done"])
    return str(made) if made == period["moves"] else f"{made} of {period['moves']}"


def in_window(commit: dict[str, Any], columns: int) -> str:
    """A line from the opening of the window to its promised end, with the commit on it: `──████────`. What goes beyond
    the end is told by `>`."""
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
    """How packets follow circuits, and all that is amiss."""
    if routes is None:
        return ["packets: routers follow links by themselves"]
    if not routes["rerouted_unix_s"]:
        return ["packets: not rerouted yet, not all is known of what is up"]
    told = [f"packets: over {routes['links']} links since {time_of_day(routes['rerouted_unix_s'])}"]
    for what, field in (("without a way", "unreachable"), ("over the packet side", "on_packet_side")):
        pairs, count = routes[field], routes[f"{field}_pairs"]
        if count:
            named = ", ".join(f"{each['from_tor']} -> {each['to_tor']}" for each in pairs[:PAIRS_SHOWN])
            more = f" and {count - PAIRS_SHOWN} more" if count > PAIRS_SHOWN else ""
            told.append(f"{what}: {escape(named)}{more}")
    told += [
        f"[yellow]no packets[/yellow] over {escape(each['what'])}: {escape(each['why'])}" for each in routes["left_out"]
    ]
    return told + [
        f"[yellow]routes amiss[/yellow] on {escape(each['what'])}: {escape(each['why'])}" for each in routes["failed"]
    ]
