"""Text output on a running fabric: rows that fit a terminal of 100 columns, and messages for empty lists."""

from typing import Any

import pytest

from orchestrrl.cli import output
from orchestrrl.cli.fabric.live import NO_PERIODS, counts_view, hosts_view, periods_view

COMMIT = {
    "window_opened_unix_s": 1000.0,
    "commanded_unix_s": 1000.1,
    "usable_unix_s": 1000.2,
    "window_until_unix_s": 1000.35,
    "moves": 9,
    "done": True,
}


def period(name: str, **changes: Any) -> dict[str, Any]:
    printed = {"announced_unix_s": 999.0, "period": name, "state": "committed", "code": "committed", "detail": ""}
    return {**printed, "stages": 2, "stages_done": 2, "moves": 9, "commits": [COMMIT], **changes}


def host(**changes: Any) -> dict[str, Any]:
    return {"host": "node7", "jobs": [], "bound_s": 0.001, "attached": True, "detail": "", **changes}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.stdout(), "_width", 100)


@pytest.mark.usefixtures("terminal")
def test_each_period_fits_on_one_terminal_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [
        period("activations"),
        period("gradients", state="kept", code="window_too_short", stages_done=1, moves=12),
        period("weights", code="was_so", moves=0, commits=[]),
    ]
    output.print_view(periods_view(shown))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if "█" in line or "was_so" in line]
    assert [row[1] for row in rows] == [each["period"] for each in shown]
    assert rows[0][2:4] == ["committed", "9"]
    assert rows[1][2:7] == ["kept:", "window_too_short", "9", "of", "12"]
    assert all("█" in row[-1] for row in rows[:2])


def test_empty_period_list_prints_advice(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_view([*periods_view([]), *counts_view([])])
    assert capsys.readouterr().out == f"{NO_PERIODS}\n"


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (host(), "no recorder runs on the host"),
        (host(attached=False, jobs=[{"job": "", "ranks": [0]}]), "the agent is not connected"),
        (host(jobs=[{"job": "", "ranks": [0]}], detail="trainer: rank 0 is in a collective"), "rank 0 is in a"),
    ],
    ids=["unrecorded", "gone", "busy"],
)
def test_host_without_window_shows_a_reason(seen: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.print_view(hosts_view([seen]))
    assert why in " ".join(capsys.readouterr().out.split())
