"""The redeployment demo: the planner proposes a redeployment and the daemon carries it out; no request is lost, and
every token is correct."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The planner uses measured rates, so on a slow machine it may not redeploy.
pytestmark = [pytest.mark.paced, pytest.mark.timeout(600)]


def test_redeployment_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrrl", "demo", "--redeploy", "--out", str(tmp_path), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert report == json.loads((tmp_path / "redeployment.json").read_text())
    assert (report["lost"], report["differing"], report["faults"]) == (0, 0, [])
    redeployment = report["redeployments"][0]
    assert (redeployment["from"], redeployment["to"]) == ({"tp2": 8}, {"tp8": 2})
    assert 0 < redeployment["at_s"] < report["makespan_s"]["free"][0]
    assert redeployment["predicted_gain_s"] > 0
    assert {step["kind"] for step in redeployment["report"]["steps"]} >= {
        "evacuate",
        "sleep",
        "wake",
        "verify",
        "admit",
        "commit",
    }
    assert redeployment["recompute"]["requests"] > 0
    assert redeployment["total"]["wall_s"] > redeployment["redeploying"]["wall_s"] > 0
    check_circuits(report, redeployment["circuits"])
    assert (tmp_path / "redeployment.png").exists()
    assert not list((tmp_path / "engines" / "engines").glob("*.json")), "engines outlive the demo"


def check_circuits(report: dict[str, Any], followed: dict[str, Any]) -> None:
    """Check the circuits: first those of TP=2, each engine in one server, then those of TP=8, each in two. All other
    circuits are unchanged."""
    assert (followed["state"], followed["code"]) == ("committed", "committed")
    assert f"circuits committed: {followed['moves']} cross-connects changed" in followed["said"]
    assert 0 < followed["switches_wall_s"] < followed["wall_s"]
    (fabric,) = report["fabric"]
    before, after = (
        {(each["pod"], each["a"], each["b"]): each["circuits"] for each in fabric[name]}
        for name in ("circuits_before", "circuits_after")
    )
    tors = [f"gen0/b{server}-r0" for server in range(4)]
    pairs = {("gen0", *pair) for pair in itertools.combinations(tors, 2)}
    wide = {("gen0", tors[0], tors[1]), ("gen0", tors[2], tors[3])}
    assert pairs <= before.keys()
    assert pairs & after.keys() == wide
    assert sum(after[pair] for pair in wide) == sum(before[pair] for pair in pairs)
    assert {k: n for k, n in before.items() if k not in pairs} == {k: n for k, n in after.items() if k not in pairs}
