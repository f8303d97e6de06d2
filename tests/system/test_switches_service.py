"""`orchestrrl ocs` against a real daemon with virtual switches, one of them in a separate process."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.journal.store import JournalReader
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.lab.testbed.processes import command_of
from orchestrrl.lab.testbed.stack import JOURNAL_FILE, Stack
from orchestrrl.rpc.pb import control_pb2, control_pb2_grpc, ocs_pb2
from orchestrrl.rpc.switches_service import drivers_of
from tests.system.daemons import running_daemon

VIRTUAL_PROCESS = Path(__file__).parents[1] / "ocs_drivers" / "virtual_process.py"
DEADLINE_S = 120.0

# One switch per test, so that all tests can use one daemon.
SWITCHES = """
  - {id: plain, driver: virtual, options: {reconfiguration_s: 0.002}}
  - {id: evicting, driver: virtual, options: {reconfiguration_s: 0.002}}
  - {id: overwritten, driver: virtual, options: {reconfiguration_s: 0.002}}
  - {id: untouched, driver: virtual}
  - {id: slow, driver: virtual, options: {reconfiguration_s: 0.5}}
  - {id: stuck, driver: virtual, options: {tune_timeout_s: 0.2, faults: [{kind: stick_mirror, port: 3}]}}
  - {id: failed, driver: virtual, options: {faults: [{kind: fail_port, port: 17}]}}
  - {id: unreachable, driver: grpc, options: {target: "127.0.0.1:1"}}
"""


def ocs_of(switches: str) -> dict[str, Any]:
    return {"mode": "advise", "ocs": yaml.safe_load(switches)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_daemon(tmp_path_factory.mktemp("switches"), ocs_of(SWITCHES)) as daemon:
        yield daemon


def ocs(daemon: Stack, *arguments: str) -> Result:
    result = CliRunner().invoke(application(), ["ocs", *arguments, "--daemon", daemon.daemon_address])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def answer(daemon: Stack, *arguments: str, status: int = 0) -> Any:
    result = ocs(daemon, *arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def circuits(daemon: Stack, switch: str) -> list[str]:
    return list(answer(daemon, "show", switch)["cross_connects"])


def test_connect_show_and_disconnect(daemon: Stack) -> None:
    change = answer(daemon, "connect", "plain", "3:17", "5:19")
    assert change["done"]
    assert [(item["cross_connect"], item["action"], item["done"]) for item in change["results"]] == [
        ("3:17", "add", True),
        ("5:19", "add", True),
    ]
    item = change["results"][0]
    assert 0 <= item["commanded_s"] <= item["tuned_s"] <= item["link_up_s"]
    shown = answer(daemon, "show", "plain")
    assert shown["circuits"] == [
        {"cross_connect": pair, "state": "tuned", "link_up": True, "ours": True} for pair in ("3:17", "5:19")
    ]
    assert shown["revision"] == change["revision"]
    assert len(shown["ports"]) == 32
    assert answer(daemon, "disconnect", "plain", "3:17")["done"]
    assert circuits(daemon, "plain") == ["5:19"]
    assert answer(daemon, "disconnect", "plain", "3:17")["detail"] == "already in effect"
    entries = {entry.kind for entry in read_journal(daemon) if entry.subject == change["operation"]}
    assert entries == {"circuits.intent", "circuits.result"}


def test_list_shows_which_switches_respond(daemon: Stack) -> None:
    listed = {switch["switch"]: switch for switch in answer(daemon, "list")["switches"]}
    plain, gone = listed["plain"], listed["unreachable"]
    assert (plain["driver"], plain["reachable"], plain["ports"]) == ("virtual", True, 32)
    assert (gone["driver"], gone["reachable"], gone["ports"]) == ("grpc", False, None)
    assert "127.0.0.1:1" in gone["detail"]
    table = ocs(daemon, "list").stdout
    assert "plain" in table
    assert "unreachable" in table
    assert ocs(daemon, "show", "unreachable").exit_code == 1


def test_safe_is_refused_and_update_shows_evictions_first(daemon: Stack) -> None:
    answer(daemon, "connect", "evicting", "3:17", "5:19")
    refused = ocs(daemon, "connect", "evicting", "3:19")
    assert refused.exit_code == 1
    assert "3:17" in refused.stderr
    assert "5:19" in refused.stderr
    dry = answer(daemon, "connect", "evicting", "3:19", "--change-mode", "update", "--dry-run")
    assert (dry["dry_run"], dry["done"], dry["evicted"]) == (True, False, ["3:17", "5:19"])
    assert circuits(daemon, "evicting") == ["3:17", "5:19"]
    done = ocs(daemon, "connect", "evicting", "3:19", "--change-mode", "update")
    assert done.exit_code == 0
    assert "evicting 3:17 5:19" in done.stderr
    assert circuits(daemon, "evicting") == ["3:19"]


def test_overwrite_keeps_only_what_is_named(daemon: Stack) -> None:
    answer(daemon, "connect", "overwritten", "3:17", "5:19")
    change = answer(daemon, "connect", "overwritten", "5:19", "6:20", "--change-mode", "overwrite")
    assert change["evicted"] == ["3:17"]
    assert circuits(daemon, "overwritten") == ["5:19", "6:20"]


@pytest.mark.parametrize(
    ("pairs", "faults"),
    [
        (
            ("3:x", "17", "5:19", "6:99999999999"),
            ["pairs[0]: must be INGRESS:EGRESS with two port numbers, got '3:x'", "pairs[1]:", "pairs[3]:"],
        ),
        (
            ("3:17", "4:17", "99:18"),
            [
                "untouched: connect[1].egress_port: is used by connect[0] already, got 17",
                "untouched: connect[2].ingress_port: must be within 1..16, got 99",
            ],
        ),
    ],
)
def test_all_invalid_arguments_are_reported_at_once(daemon: Stack, pairs: tuple[str, ...], faults: list[str]) -> None:
    result = ocs(daemon, "connect", "untouched", *pairs)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == len(faults)
    assert all(line.startswith(fault) for line, fault in zip(lines, faults, strict=True))
    assert circuits(daemon, "untouched") == []


@pytest.mark.parametrize("verb", ["connect", "disconnect"])
def test_revert_time_and_pairs_are_checked_together(daemon: Stack, verb: str) -> None:
    refused = ocs(daemon, verb, "plain", "3", "--revert-in-s", "-5")
    assert refused.exit_code == 2
    assert [line.partition(":")[0] for line in refused.stderr.splitlines()] == ["pairs[0]", "--revert-in-s"]


def test_unknown_switch_lists_the_known_ones(daemon: Stack) -> None:
    result = ocs(daemon, "show", "agg9")
    assert result.exit_code == 1
    assert "'agg9'" in result.stderr
    assert "overwritten, plain" in result.stderr


def test_failed_circuit_is_rolled_back(daemon: Stack) -> None:
    change = answer(daemon, "connect", "stuck", "3:17", "5:19", status=1)
    assert change["rolled_back"]
    assert not change["done"]
    assert not any(item["done"] for item in change["results"])
    assert "3:17: the device shows it as tuning" in change["detail"]
    assert circuits(daemon, "stuck") == []
    table = ocs(daemon, "connect", "stuck", "3:17")
    assert table.exit_code == 1
    assert "NO" in table.stdout


def test_failed_port_is_shown_and_refused(daemon: Stack) -> None:
    assert "failed" in ocs(daemon, "show", "failed").stdout
    refused = ocs(daemon, "connect", "failed", "3:17")
    assert refused.exit_code == 1
    assert "connect[0].egress_port: port is failed, got 17" in refused.stderr


async def test_change_continues_when_the_operator_disconnects(daemon: Stack) -> None:
    async with grpc.aio.insecure_channel(daemon.daemon_address) as channel:
        stub = control_pb2_grpc.SwitchesStub(channel)
        pair = ocs_pb2.CrossConnect(ingress_port=3, egress_port=17)
        call = stub.ConnectPorts(control_pb2.ConnectPortsRequest(switch_id="slow", cross_connects=[pair]))
        await call.wait_for_connection()
        while not of_switch(daemon, "slow", "circuits.intent"):
            await asyncio.sleep(0.01)
        call.cancel()
    async with asyncio.timeout(DEADLINE_S):
        while not of_switch(daemon, "slow", "circuits.result"):
            await asyncio.sleep(0.01)
    assert of_switch(daemon, "slow", "circuits.result") == [True]


def test_unreachable_daemon_is_reported() -> None:
    result = CliRunner().invoke(application(), ["ocs", "list", "--daemon", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no daemon at 127.0.0.1:1" in result.stderr


@pytest.mark.smoke
def test_killed_daemon_leaves_no_partial_change(tmp_path: Path) -> None:
    device = subprocess.Popen(
        [sys.executable, str(VIRTUAL_PROCESS), json.dumps({"reconfiguration_s": 1.0})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert device.stdin is not None
    assert device.stdout is not None
    target = f"127.0.0.1:{device.stdout.readline().strip()}"
    switches = f"\n  - {{id: far, driver: grpc, options: {{target: '{target}'}}}}\n"
    with running_daemon(tmp_path, ocs_of(switches)) as daemon:
        command = [
            sys.executable,
            "-m",
            "orchestrrl",
            "ocs",
            "connect",
            "far",
            "3:17",
            "--daemon",
            daemon.daemon_address,
        ]
        order = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: of_switch(daemon, "far", "circuits.intent"))
        daemon.daemon.kill()
        _, words = order.communicate(timeout=DEADLINE_S)
        assert order.returncode == 1
        assert "Traceback" not in words
    with running_daemon(tmp_path, ocs_of(switches)) as daemon:
        wait_for(lambda: of_switch(daemon, "far", "circuits.result"))
        # Only the device shows whether the command had reached it when the daemon died.
        (done,) = of_switch(daemon, "far", "circuits.result")
        assert circuits(daemon, "far") == (["3:17"] if done else [])
    device.stdin.close()
    device.wait(DEADLINE_S)
    device.stdout.close()


@pytest.fixture
def far() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a device in a separate process, and return it with its entry for the daemon's configuration."""
    device = subprocess.Popen(
        [sys.executable, str(VIRTUAL_PROCESS), json.dumps({"reconfiguration_s": 0.002})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert device.stdin is not None
    assert device.stdout is not None
    target = f"127.0.0.1:{device.stdout.readline().strip()}"
    yield device, f"\n  - {{id: far, driver: grpc, options: {{target: '{target}'}}}}\n"
    device.communicate()


def test_foreign_circuits_are_taken_over_by_name(far: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    device, switches = far
    assert device.stdin is not None
    assert device.stdout is not None
    device.stdin.write('{"foreign": [[9, 25], [10, 26]]}\n')
    device.stdin.flush()
    device.stdout.readline()
    with running_daemon(tmp_path, ocs_of(switches)) as daemon:
        assert "9:25" in ocs(daemon, "show", "far").stdout
        assert "other" in ocs(daemon, "show", "far").stdout
        refused = ocs(daemon, "disconnect", "far", "9:25")
        assert refused.exit_code == 1
        assert "orchestrrl ocs take-over far 9:25" in refused.stderr
        absent = ocs(daemon, "take-over", "far", "9:25", "9:26")
        assert absent.exit_code == 1
        assert "9:26: is not on the device" in absent.stderr
        assert answer(daemon, "take-over", "far", "9:25")["detail"] == "owned from now on: 9:25"
        assert {c["cross_connect"]: c["ours"] for c in answer(daemon, "show", "far")["circuits"]} == {
            "9:25": True,
            "10:26": False,
        }
    with running_daemon(tmp_path, ocs_of(switches)) as daemon:
        assert answer(daemon, "disconnect", "far", "9:25")["done"]
        assert circuits(daemon, "far") == ["10:26"]
    everything = switches.replace("driver: grpc", "driver: grpc, owns: all")
    with running_daemon(tmp_path, ocs_of(everything)) as daemon:
        assert answer(daemon, "show", "far")["circuits"][0]["ours"]
        assert answer(daemon, "disconnect", "far", "10:26")["done"]


def test_unconfirmed_change_is_confirmed_or_reverted(far: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    _, switches = far
    with running_daemon(tmp_path, ocs_of(switches)) as daemon:
        nothing = ocs(daemon, "confirm", "far")
        assert nothing.exit_code == 1
        assert "no change is on trial" in nothing.stderr
        assert ocs(daemon, "connect", "far", "3:17", "--revert-in-s", "0").exit_code == 2
        change = answer(daemon, "connect", "far", "3:17", "--revert-in-s", "1000")
        assert change["done"]
        assert change["revert_at_unix_s"] > time.time() + 500
        assert answer(daemon, "show", "far")["unconfirmed"]["added"] == ["3:17"]
        assert "is on trial until" in ocs(daemon, "show", "far").stdout
        meanwhile = ocs(daemon, "connect", "far", "5:19")
        assert meanwhile.exit_code == 1
        assert "is on trial until" in meanwhile.stderr
        assert answer(daemon, "confirm", "far")["done"]
        assert answer(daemon, "show", "far")["unconfirmed"] is None
        assert answer(daemon, "disconnect", "far", "3:17", "--revert-in-s", "1000")["done"]
        daemon.daemon.kill()
    with running_daemon(tmp_path, ocs_of(switches)) as daemon:  # because it was not confirmed
        wait_for(lambda: len(of_switch(daemon, "far", "circuits.result")) == 2)
        assert circuits(daemon, "far") == ["3:17"]
        assert answer(daemon, "show", "far")["unconfirmed"] is None


def test_errors_of_all_switches_are_reported_at_once() -> None:
    config = parse_config("""
ocs:
  - {id: a, driver: virtual, options: {ports: 31}}
  - {id: b, driver: telescope}
  - {id: c, driver: grpc}
""")
    with pytest.raises(ProblemFaults) as refused:
        drivers_of(config.ocs, WallClock())
    assert refused.value.faults == [
        "ocs[0].options.ports: must be an even number >= 2, got 31",
        "ocs[1].driver: must be one of calient_rest, gnmi, grpc, netconf, restconf, scpi, tl1, virtual, "
        "got 'telescope'",
        "ocs[2].options.target: is missing",
    ]


def read_journal(daemon: Stack) -> list[Any]:
    reader = JournalReader(daemon.folder / JOURNAL_FILE)
    try:
        return reader.tail(1000, ("circuits.intent", "circuits.result"))
    finally:
        reader.close()


def of_switch(daemon: Stack, switch: str, kind: str) -> list[bool]:
    """Return, for each journal entry of that kind about the switch, whether it is done (always True for an intent)."""
    return [e.body.get("done", True) for e in read_journal(daemon) if e.kind == kind and e.body["switch"] == switch]


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)
