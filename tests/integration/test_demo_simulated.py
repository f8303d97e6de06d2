"""The demo on simulated engines, one seed: nothing is lost, every token is the expected one, requests have moved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrrl", "demo", "--seeds", "2", "--out", str(tmp_path), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (report["lost"], report["differing"], report["faults"]) == (0, 0, [])
    assert report["requests"] == 256
    assert report["moves"] > 0
    assert report["tokens_recomputed"] > 0
    assert (tmp_path / "remaining_requests.png").exists()


@pytest.mark.timeout(600)
def test_the_demo_of_moves_by_kv(tmp_path: Path) -> None:
    """The clock decides how many go by which method; each has what it was predicted to take."""
    command = [sys.executable, "-m", "orchestrrl", "demo", "--kv", "--seeds", "1", "--out", str(tmp_path), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert (report["lost"], report["differing"], report["faults"]) == (0, 0, [])
    assert {mark["method"] for mark in report["moves_by_method"]} <= {"recompute", "transfer"}
    assert sum(mark["moves"] for mark in report["moves_by_method"]) > 0
    for mark in report["moves_by_method"]:
        assert mark["predicted_s"] > 0, mark
        assert mark["actual_s"] > 0, mark
