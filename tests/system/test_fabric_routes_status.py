"""A daemon process with routers: it reroutes, `fabric status` shows the packet routes, and it stops cleanly."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.fabric.site import read_site

SITE = Path(__file__).parents[2] / "deploy/examples/site.yaml"
DEADLINE_S = 120.0


def document(folder: Path) -> dict[str, Any]:
    """Build a configuration with virtual ToRs. They get no light from virtual switches, so links are excluded and
    reported."""
    site = read_site(SITE)
    routers = [
        {
            "tor": tor.id,
            "driver": "virtual",
            "options": {"address": f"192.0.2.{n}", "interfaces": ["swp1", "swp2", "swp3", "swp4", "eth0"]},
            "address": f"192.0.2.{n}",
            "prefixes": [f"10.0.{n}.0/24"],
            "interfaces": ["swp1", "swp2", "swp3", "swp4"],
            "packet_side": {"interface": "eth0", "address": f"198.51.100.{n}"} if n > 1 else None,
        }
        for n, tor in enumerate(site.tors, start=1)
    ]
    return {
        "mode": "act",
        "listen": {"address": "127.0.0.1:0"},
        "journal": {"path": str(folder / "journal.sqlite")},
        "ocs": [
            {"id": switch.id, "driver": "virtual", "options": {"connectivity": "any_to_any"}}
            for switch in site.switches
        ],
        "fabric": {"site": str(SITE), "routers": routers, "rerouting": {"link_up_s": 0.05}},
    }


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    path = tmp_path / "daemon.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path)))
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrrl", "daemon", "-c", str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    if process.poll() is None:
        process.kill()
    process.wait()


def run(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "250"}).invoke(application(), list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_status_shows_packet_routes(daemon: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    process, address = daemon
    intent = tmp_path / "intent.json"
    traffic = {"operation": "EP", "primitive": "all_to_all", "groups": [[16, 17, 18, 19]], "bytes_per_rank": 4e9}
    intent.write_text(json.dumps({"stage": "gen", "traffic": [traffic]}))
    last = json.loads(
        run("fabric", "announce", "gen", "--intent", str(intent), "--boundary", "--daemon", address, "--json")
    )
    assert last["state"] == "committed"
    assert "not used: gen0/r0/" in last["detail"]
    routes = json.loads(run("fabric", "status", "--daemon", address, "--json"))["routes"]
    assert routes["links"] == 0
    assert {each["what"].split("/")[0] for each in routes["left_out"]} >= {"gen0"}
    # One ToR has no packet network.
    assert len(routes["unreachable"]) == routes["unreachable_pairs"] == 14
    assert len(routes["on_packet_side"]) == routes["on_packet_side_pairs"] == 42
    shown = run("fabric", "status", "--daemon", address)
    assert "packets: over 0 links since " in shown
    assert "without a route: " in shown
    assert "no packets over gen0/r0/" in shown
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
