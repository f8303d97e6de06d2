"""The fabric in a box, as `orchestrrl fabric box` runs it: real TCP over circuits of emulated switches. Ratios and what
was lost are compared, never how long something took; but a pause in a transfer may be as long as mirrors move. Tests
that compare how fast bytes go are marked `alone`."""

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

# So slow that nothing else which stands still for a moment is taken for it.
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
async def test_a_transfer_lives_through_changes_and_a_failed_port_is_worked_around(tmp_path: Path) -> None:
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
    assert min(around, masked) > 0.4 * before  # flows, whose share of circuits is by their hash


@pytest.mark.slow
async def test_verify_finds_a_cable_that_is_plugged_in_elsewhere(tmp_path: Path) -> None:
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
async def test_rates_follow_circuits_and_each_stage_of_a_cycle_has_its_own(tmp_path: Path) -> None:
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
    # From the electrical network onto circuits; then from the circuits of others, which carry some of it.
    assert first["mbps"] > 5 * first["before_mbps"]
    assert generation["mbps"] > 5 * generation["before_mbps"]
    assert weights["mbps"] > 1.2 * weights["before_mbps"]
    assert second["circuits"]["train0/r0 - train0/r1"] == 4
    assert weights["circuits"]["gen0/up0 - train0/up0"] == 4


def test_nothing_is_left_of_a_box_whose_owner_was_killed(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    words = [sys.executable, "-m", "orchestrrl", "fabric", "box", "--show", "circuits", "--out", str(tmp_path)]
    owner = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def inside() -> set[int]:
        """Processes of the box, by their command lines."""
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


def test_without_the_tools_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enter, "SEARCHED", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "unshare, ip, tc, mount cannot be found" in enter.lacking()


def test_what_is_malformed_is_told_at_once(tmp_path: Path) -> None:
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
    told = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert told.returncode == 2
    assert [line.partition(":")[0] for line in told.stderr.splitlines()] == ["--show", "--protocols", "--seconds"]
    assert json.dumps("Traceback") not in told.stderr
