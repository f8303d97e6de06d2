"""How the circuits of a running daemon are told to people: periods, windows, routes, traced hosts."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from orchestrrl.cli.fleet.status import name_of_period
from orchestrrl.cli.formats import duration, time_of_day
from orchestrrl.cli.output import Columns, View, stdout, table

if TYPE_CHECKING:
    from rich.table import Table

CIRCUITS_SHOWN = 40
REASONS_SHOWN = 8
PAIRS_SHOWN = 6
WINDOW_COLUMNS = 20
NARROW_WINDOW_COLUMNS = 10  # where a row with the longest of reasons would not fit on a line else
WIDE_COLUMNS = 110
NO_PERIODS = "No period was announced yet: a trainer does, or `orchestrrl fabric announce PERIOD --intent FILE`."


def circuits_view(circuits: Sequence[dict[str, Any]]) -> View:
    if not circuits:
        yield from ("No circuits are up.", "")
        return
    columns: Columns = {"where": lambda each: each["pod"] or "core", "from": "a", "to": "b", "circuits": "count"}
    yield table(f"Circuits: {sum(each['count'] for each in circuits)}", columns, circuits[:CIRCUITS_SHOWN])
    if len(circuits) > CIRCUITS_SHOWN:
        yield from (f"and between {len(circuits) - CIRCUITS_SHOWN} other pairs: --json has all", "")


def times_table(times: Iterable[dict[str, Any]]) -> "Table":
    columns: Columns = {
        "switch": "switch_id",
        "expected": lambda each: duration(each["usable_s"]),
        "changes measured": "samples",
    }
    return table("What a change of circuits takes", columns, times)


def hosts_view(hosts: Sequence[dict[str, Any]]) -> View:
    if not hosts:
        yield "No host tells of windows: `orchestrrl agent --rings FOLDER` on those that train does."
        return
    columns: Columns = {
        "host": "host",
        "ranks": lambda host: ", ".join(
            f"{len(job['ranks'])}{' of ' + job['job'] if job['job'] else ''}" for job in host["jobs"]
        ),
        "clock": lambda host: f"within {duration(host['bound_s'])}" if host["bound_s"] else None,
        "agent": lambda host: "attached" if host["attached"] else "gone",
        "no window now, because": _no_window,
    }
    yield table("Traced hosts", columns, hosts)


def _no_window(host: dict[str, Any]) -> str | None:
    if not host["attached"]:
        return "its agent is gone"
    return host["detail"] or (None if host["jobs"] else "no recorder runs on it")


def periods_view(periods: Sequence[dict[str, Any]]) -> View:
    if not periods:
        yield NO_PERIODS
        return
    yield table("Periods", PERIOD_COLUMNS, periods)
    yield from map(escape, reasons(periods))


def counts_view(counts: Sequence[dict[str, Any]]) -> View:
    if counts:
        yield table("All that ended so far", {"state": "state", "why": _why, "periods": "count"}, counts)


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


def _state(period: dict[str, Any]) -> str:
    return f"{period['state']}: {why}" if (why := _why(period)) else str(period["state"])


def _waited(period: dict[str, Any]) -> str:
    commits = period["commits"]
    return duration(commits[0]["commanded_unix_s"] - period["announced_unix_s"] if commits else None)


def _took(period: dict[str, Any]) -> str:
    commits = period["commits"]
    spans = [each["usable_unix_s"] - each["commanded_unix_s"] for each in commits]
    return duration(sum(spans) if commits else None)


def _windowed(period: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first commit, where a window was waited for."""
    return next((each for each in period["commits"][:1] if each["window_until_unix_s"] > 0), None)


def _window(period: dict[str, Any]) -> str | None:
    commit = _windowed(period)
    return None if commit is None else duration(commit["window_until_unix_s"] - commit["window_opened_unix_s"])


def _commit(period: dict[str, Any]) -> str | None:
    commit = _windowed(period)
    columns = WINDOW_COLUMNS if stdout().width >= WIDE_COLUMNS else NARROW_WINDOW_COLUMNS
    return None if commit is None else in_window(commit, columns)


def _moves(period: dict[str, Any]) -> str:
    """Those made, where they are not all."""
    made = sum(each["moves"] for each in period["commits"] if each["done"])
    return str(made) if made == period["moves"] else f"{made} of {period['moves']}"


PERIOD_COLUMNS: Columns = {
    "announced": lambda period: time_of_day(period["announced_unix_s"]),
    "period": name_of_period,
    "became": _state,
    "moves": _moves,
    "waited": _waited,
    "took": _took,
    "window": _window,
    "commit": _commit,
}


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
