"""The gate in words: how it stands, and how far the fleet has come to rest."""

from typing import Any

from rich.markup import escape

from orchestrrl.cli.formats import count, time_of_day


def gate_lines(gate: dict[str, Any]) -> list[str]:
    """The state in a line or two, e.g. for `orchestrrl status`."""
    version = "" if gate["policy_version"] is None else f", policy version {gate['policy_version']}"
    if gate["phase"] in ("", "open"):
        lines = [f"gate: open{version}", *_source(gate)]
        return lines if not gate["detail"] else [*lines, f"last opened: {escape(gate['detail'])}"]
    until = time_of_day(gate["lease_until_unix_s"])
    holder = f" for {gate['holder']}" if gate["holder"] else ""
    lines = [
        f"gate: [bold]{gate['phase']}[/bold]{version}, mode {gate['mode']}, frozen requests {gate['frozen']}",
        escape(f"lease {gate['lease_id']}{holder}: all goes on by itself at {until}"),
        *_source(gate),
    ]
    words = progress(gate)
    return [*lines, words] if words else lines


def _source(gate: dict[str, Any]) -> list[str]:
    return [escape(f"weights are in {gate['weights_source']}")] if gate["weights_source"] else []


def progress(gate: dict[str, Any]) -> str:
    """How far the fleet has come to rest; nothing where its reports do not know yet that it has."""
    reports = [gateway["report"] for gateway in gate["gateways"] if gateway["report"]]
    old = gate["phase"] == "quiet" and any(report["phase"] != "quiet" for report in reports)
    if gate["phase"] in ("", "open") or not reports or old:
        return ""
    running, frozen, held = (sum(report[name] for report in reports) for name in ("running", "frozen", "held"))
    return f"requests: {count(running)} run, {count(frozen)} frozen, {count(held)} held"
