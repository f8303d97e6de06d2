"""A weight sync in the fabric in a box, as run by `orchestrrl sync box`: real processes and bytes over circuits for the
sync. Tests compare the bytes that enter PoDs, not durations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrrl.lab.box import enter

pytestmark = pytest.mark.alone  # includes retransmissions if the machine stalls

MB, RECEIVERS, PODS = 12.0, 10, 2


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    if why := enter.lacking():
        pytest.skip(f"no fabric in a box here: {why}")


def test_all_ways_deliver_the_same_bytes_and_the_tree_enters_each_pod_once(tmp_path: Path) -> None:
    words = ("sync", "box", "--mb", f"{MB:g}", "--circuit-mbps", "300", "--out", str(tmp_path), "--json")
    ran = subprocess.run([sys.executable, "-m", "orchestrrl", *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    size = found["bytes"]
    assert size == pytest.approx(MB * 1e6, rel=0.01)
    assert (found["receivers"], [row["way"] for row in found["rows"]]) == (RECEIVERS, ["tree", "two_stage", "naive"])
    rows = {row["way"]: row for row in found["rows"]}
    for row in found["rows"]:
        assert row["identical"] == RECEIVERS
        assert row["carried_bytes"] == RECEIVERS * size
        assert row["circuits"]["moves"] > 0  # generation had these circuits before
        # From the counters of the core's ports, including headers and retransmissions.
        assert row["crossing_bytes"] <= row["crossed_bytes"] < 1.3 * row["crossing_bytes"]
    assert rows["tree"]["crossing_bytes"] == rows["two_stage"]["crossing_bytes"] == PODS * size
    assert rows["naive"]["crossing_bytes"] == RECEIVERS * size
    assert found["bound_s"] <= rows["tree"]["estimate_s"]


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    words = ("sync", "box", "--mb", "0", "--way", "flood", "--transport", "pigeons", "--rounds", "0", "--out")
    command = [sys.executable, "-m", "orchestrrl", *words, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    for fault in ("--mb: must be", "--way: must be one of", "--transport: must be", "--rounds: must be"):
        assert fault in ran.stderr
