"""The pause barrier in words: how it stands, and how far the fleet has come to rest."""

from typing import Any

from rich.markup import escape

from orchestrrl.cli.formats import count, time_of_day


def barrier_lines(barrier: dict[str, Any]) -> list[str]:
    """The state in a line or two, e.g. for `orchestrrl status`."""
    version = "" if barrier["policy_version"] is None else f", policy version {barrier['policy_version']}"
    if barrier["phase"] in ("", "open"):
        lines = [f"barrier: open{version}", *_source(barrier)]
        return lines if not barrier["detail"] else [*lines, f"last opened: {escape(barrier['detail'])}"]
    until = time_of_day(barrier["lease_until_unix_s"])
    holder = f" for {barrier['holder']}" if barrier["holder"] else ""
    lines = [
        f"barrier: [bold]{barrier['phase']}[/bold]{version}, mode {barrier['mode']},"
        f" frozen requests {barrier['frozen']}",
        escape(f"lease {barrier['lease_id']}{holder}: all goes on by itself at {until}"),
        *_source(barrier),
    ]
    words = progress(barrier)
    return [*lines, words] if words else lines


def _source(barrier: dict[str, Any]) -> list[str]:
    return [escape(f"weights are in {barrier['weights_source']}")] if barrier["weights_source"] else []


def progress(barrier: dict[str, Any]) -> str:
    """How far the fleet has come to rest; nothing where its reports do not know yet that it has."""
    reports = [gateway["report"] for gateway in barrier["gateways"] if gateway["report"]]
    old = barrier["phase"] == "quiet" and any(report["phase"] != "quiet" for report in reports)
    if barrier["phase"] in ("", "open") or not reports or old:
        return ""
    running, frozen, held = (sum(report[name] for report in reports) for name in ("running", "frozen", "held"))
    return f"requests: {count(running)} run, {count(frozen)} frozen, {count(held)} held"
