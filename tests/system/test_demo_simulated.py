"""The demo on simulated engines, one seed: nothing is lost, every token is the expected one, requests have moved."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A machine that stands still for seconds shows the balancer other loads than those it has, and it moves little.
pytestmark = [pytest.mark.paced, pytest.mark.timeout(1200)]
TRIES = 3


def demo(folder: Path, *words: str, moved: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The report of one in which that much was moved. Nothing is lost in any."""
    for attempt in range(TRIES):
        out = folder / str(attempt)
        command = [sys.executable, "-m", "orchestrrl", "demo", *words, "--out", str(out), "--json"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        report: dict[str, Any] = json.loads(shown.stdout)
        assert report == json.loads((out / "report.json").read_text())
        assert (report["lost"], report["differing"], report["faults"]) == (0, 0, [])
        if moved(report):
            assert (out / "remaining_requests.png").exists()
            return report
    raise AssertionError(f"in none of {TRIES} that much was moved: {report}")


def test_the_demo(tmp_path: Path) -> None:
    report = demo(tmp_path, "--seeds", "2", moved=lambda told: told["moves"] > 0 and told["tokens_recomputed"] > 0)
    assert report["requests"] == 256
    # New weights while requests ran: on every engine, and each token is of the version that its answer names.
    synced = report["sync"]
    assert (synced["code"], synced["serve_it"], synced["answered"]) == ("done", 4, synced["requests"])
    assert (synced["tokens_differing"], synced["faults"]) == (0, [])
    assert set(synced["tokens_by_version"]) <= {"1", "2"}
    assert {"gather", "phase_a", "fence", "install", "resume"} <= set(synced["phases_s"])


def test_the_demo_of_moves_by_kv(tmp_path: Path) -> None:
    """The clock decides how many go by which method; each has what it was predicted to take."""

    def moved(told: dict[str, Any]) -> bool:
        return sum(mark["moves"] for mark in told["moves_by_method"]) > 0

    report = demo(tmp_path, "--kv", "--seeds", "1", moved=moved)
    assert {mark["method"] for mark in report["moves_by_method"]} <= {"recompute", "transfer"}
    for mark in report["moves_by_method"]:
        assert mark["predicted_s"] > 0, mark
        assert mark["actual_s"] > 0, mark
        assert mark["predicted_over_actual"] == pytest.approx(mark["predicted_s"] / mark["actual_s"]), mark
