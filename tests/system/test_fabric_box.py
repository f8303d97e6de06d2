"""The fabric in a box, as run by `orchestrrl fabric box`: TCP over circuits of emulated switches. Tests compare ratios
and losses, not durations, except that a pause in a transfer must be shorter than a move of mirrors. Tests that compare
rates are marked `alone`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrrl.lab.box import enter
from orchestrrl.lab.box.run import PROTOCOLS, SITE, BoxOrder, run_box

# So slow that a short stall of the machine is not mistaken for it.
SLOW_S = 1.5


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    if why := enter.lacking():
        pytest.skip(f"no fabric in a box here: {why}")


def order(folder: Path, *shows: str, site: str = SITE) -> BoxOrder:
    (folder / "site.yaml").write_text(site)
    return BoxOrder(str(folder), shows, PROTOCOLS, seconds=1.5, iterations=1, collective_s=0.5, pause_s=1.8, changes=2)


@pytest.mark.alone
@pytest.mark.slow
async def test_transfer_survives_changes_and_failed_port_is_bypassed(tmp_path: Path) -> None:
    slow = SITE.replace("0.025", str(SLOW_S)).replace("0.010", str(SLOW_S))
    found = await run_box(order(tmp_path, "transition", "failed_port", site=slow))
    for row in found["transition"]["rows"]:
        assert (row["state"], row["detail"]) == ("committed", "")
        assert row["moves"] > 0
        assert row["longest_pause_s"] < SLOW_S < row["elapsed_s"]
    port = found["failed_port"]
    before, around, masked = port["mbps"]
    up, left = port["circuits"]
    assert port["is_masked"]
    assert left == up - 1
    assert min(around, masked) > 0.4 * before  # flows are assigned to circuits by their hash


@pytest.mark.slow
async def test_verify_finds_swapped_cables(tmp_path: Path) -> None:
    found = (await run_box(order(tmp_path, "wrong_cable")))["wrong_cable"]
    used, spare = found["swapped"]
    assert found["sound"]["faults"] == found["mended"]["faults"] == []
    assert found["mended"]["fibres"] == found["sound"]["fibres"] < found["walked"]["fibres"]
    assert [(fault["kind"], fault["where"]) for fault in found["looked"]["faults"]] == [("wrong_cable", used)]
    assert {(fault["kind"], fault["where"]) for fault in found["walked"]["faults"]} == {
        ("wrong_cable", used),
        ("wrong_cable", spare),
    }


@pytest.mark.alone
async def test_rates_follow_circuits_and_stages_get_their_circuits(tmp_path: Path) -> None:
    found = await run_box(order(tmp_path, "circuits", "cycle"))
    assert len(set(found["switches"].values())) == 3
    rows = found["circuits"]["rows"]
    assert [row["circuits"] for row in rows] == [1, 2, 3]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 2, 3], rel=0.1)
    stages = found["cycle"]["stages"]
    assert [stage["period"] for stage in stages] == ["training", "generation", "weights", "training"]
    for stage in stages:
        assert (stage["code"], stage["detail"]) == ("committed", "")
        assert stage["in_window"] in (True, None)
    first, generation, weights, second = stages
    # From the electrical network to circuits; then from the circuits of other stages, which carry part of the traffic.
    assert first["mbps"] > 5 * first["before_mbps"]
    assert generation["mbps"] > 5 * generation["before_mbps"]
    assert weights["mbps"] > 1.2 * weights["before_mbps"]
    assert second["circuits"]["train0/r0 - train0/r1"] == 4
    assert weights["circuits"]["gen0/up0 - train0/up0"] == 4


def test_box_is_removed_when_its_owner_is_killed(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    words = [sys.executable, "-m", "orchestrrl", "fabric", "box", "--show", "circuits", "--out", str(tmp_path)]
    owner = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def inside() -> set[int]:
        """Return the processes of the box, found by their command lines."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"orchestrrl.lab.box.inside" in words and str(tmp_path).encode() in b" ".join(words):
                found.add(int(path.parent.name))
        return found

    async def until(condition: object) -> None:
        async with asyncio.timeout(120):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.05)

    asyncio.run(until(lambda: (tmp_path / "box.log").exists() and inside()))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    asyncio.run(until(lambda: not inside()))


def test_missing_tools_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enter, "SEARCHED", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "unshare, ip, tc, mount not found" in enter.lacking()


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "orchestrrl",
        "fabric",
        "box",
        "--show",
        "all",
        "--protocols",
        "morse",
        "--seconds",
        "0",
    ]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert shown.returncode == 2
    assert [line.partition(":")[0] for line in shown.stderr.splitlines()] == ["--show", "--protocols", "--seconds"]
    assert json.dumps("Traceback") not in shown.stderr
