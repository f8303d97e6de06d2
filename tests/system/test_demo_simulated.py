"""The demo on simulated engines with one seed: no request is lost, every token is as expected, requests have moved."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# If the machine stalls for seconds, the balancer sees outdated loads and moves few requests.
pytestmark = [pytest.mark.paced, pytest.mark.timeout(1200)]
TRIES = 3


def demo(folder: Path, *words: str, moved: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the report of a run with at least that many moves. No run may lose a request."""
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
    raise AssertionError(f"too few moves in {TRIES} runs: {report}")


def test_demo(tmp_path: Path) -> None:
    report = demo(
        tmp_path, "--seeds", "2", moved=lambda output: output["moves"] > 0 and output["tokens_recomputed"] > 0
    )
    assert report["requests"] == 256
    # New weights during the step: on every engine, and each token is of the version that its response names.
    synced = report["sync"]
    assert (synced["code"], synced["serve_it"], synced["answered"]) == ("done", 4, synced["requests"])
    assert (synced["tokens_differing"], synced["faults"]) == (0, [])
    assert set(synced["tokens_by_version"]) <= {"1", "2"}
    assert {"gather", "phase_a", "fence", "install", "resume"} <= set(synced["phases_s"])


def test_demo_with_kv_transfer(tmp_path: Path) -> None:
    """The number of moves per method depends on timing; each method has its predicted times."""

    def moved(output: dict[str, Any]) -> bool:
        return sum(mark["moves"] for mark in output["moves_by_method"]) > 0

    report = demo(tmp_path, "--kv", "--seeds", "1", moved=moved)
    assert {mark["method"] for mark in report["moves_by_method"]} <= {"recompute", "transfer"}
    for mark in report["moves_by_method"]:
        assert mark["predicted_s"] > 0, mark
        assert mark["actual_s"] > 0, mark
        assert mark["predicted_over_actual"] == pytest.approx(mark["predicted_s"] / mark["actual_s"]), mark
