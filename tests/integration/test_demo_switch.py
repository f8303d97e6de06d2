"""The demo of a switch: the planner wants one and the daemon does it; nothing is lost, and every token is right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_the_demo_of_a_switch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrrl", "demo", "--switch", "--out", str(tmp_path), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert report == json.loads((tmp_path / "switch.json").read_text())
    assert (report["lost"], report["differing"], report["faults"]) == (0, 0, [])
    switch = report["switches"][0]
    assert (switch["from"], switch["to"]) == ({"tp2": 8}, {"tp8": 2})
    assert 0 < switch["at_s"] < report["makespan_s"]["free"][0]
    assert switch["predicted_gain_s"] > 0
    assert {step["kind"] for step in switch["steps"]} >= {"evacuate", "sleep", "wake", "verify", "admit", "commit"}
    assert switch["recompute"]["requests"] > 0
    assert switch["total"]["wall_s"] > switch["switching"]["wall_s"] > 0
    assert (tmp_path / "switch.png").exists()
    assert not list((tmp_path / "engines" / "engines").glob("*.json")), "engines outlive the demo"
