"""`orchestrrl ocs emulate`: the printed configuration works with its driver, and errors in flags are reported."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ocs_drivers.conformance import carry_out, connected
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.registry import EMULATORS, make_emulator
from ocs_drivers.model import CrossConnect
from ocs_drivers.registry import make_driver
from orchestrrl.cli.main import application
from orchestrrl.cli.ocs import emulator as ocs_emulator
from orchestrrl.lab.emulated_switch import GrpcEmulator

DEADLINE_S = 120.0
PATIENT = {"tune_timeout_s": DEADLINE_S}


def configured(protocol: str, address: str) -> dict[str, Any]:
    """Parse the configuration that the command prints."""
    item: dict[str, Any] = yaml.safe_load(ocs_emulator._configured(protocol, address))
    return item


async def test_driver_service_is_a_protocol() -> None:
    emulator = GrpcEmulator(DevicePanel(4, 2, reconfiguration_s=0.001))
    item = configured("grpc", await emulator.start())
    driver = make_driver(item["driver"], "ocs1", item["options"])
    assert (await carry_out(driver, (CrossConnect(4, 6),))).done
    assert emulator.device.where_does(4) == 6
    await driver.close()
    await emulator.stop()


@pytest.mark.parametrize("protocol", EMULATORS)
async def test_every_protocol_prints_a_valid_driver_configuration(protocol: str) -> None:
    emulator = make_emulator(protocol, DevicePanel(4, 4, reconfiguration_s=0.001))
    item = configured(protocol, await emulator.start())
    driver = make_driver(item["driver"], "ocs1", {**item["options"], **PATIENT})
    try:
        facts = await driver.facts()
        assert facts.ingress_ports == emulator.device.facts.ingress_ports
        pair = CrossConnect(facts.ingress_ports[0], facts.egress_ports[-1])
        assert (await carry_out(driver, (pair,))).done
        assert await connected(driver) == {pair}
    finally:
        await driver.close()
        await emulator.stop()


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {kind: fall_port, port: 2}\n- {at_s: -1, kind: restart}\n")
    given = ["--protocol", "scpii", "--ports", "4", "--delay-ms", "-1", "--jitter-ms", "nan", "--listen", "somewhere"]
    result = CliRunner().invoke(
        application(), ["ocs", "emulate", *given, "--faults", str(faults), "--quirk", "crlf", "--quirk", "x=["]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    paths = [line.split(":")[0] for line in result.stderr.splitlines() if line.startswith("--")]
    assert paths == [
        "--faults[0].kind",
        "--faults[1].at_s",
        "--ports",
        "--delay-ms",
        "--jitter-ms",
        "--listen",
        "--quirk",
        "--quirk",
        "--protocol",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--quirk", "crfl=true"], "--quirk crfl: is not known (known: answers_apart, crlf, "),
        (["--quirk", "crlf=3"], "--quirk crlf: must be true or false, got 3"),
        (["--protocol", "grpc", "--quirk", "crlf=true"], "--quirk crlf: grpc has no quirks"),
        (
            ["--faults", "FILE", "--ports", "1x1"],
            "--faults: port must be one of the device's (ingress 1..1, egress 2..2",
        ),
        (["--faults", "missing"], "--faults: cannot be read: "),
    ],
)
def test_impossible_device_is_rejected(tmp_path: Path, given: list[str], words: str) -> None:
    file = tmp_path / "FILE"
    file.write_text("- {kind: fail_port, port: 9}\n")
    result = CliRunner().invoke(
        application(), ["ocs", "emulate", *(str(file) if word == "FILE" else word for word in given)]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(words)


def test_missing_library_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.setitem(sys.modules, "ncclient", None)
    for name in [name for name in sys.modules if name.startswith("ocs_drivers.emulators.netconf")]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(application(), ["ocs", "emulate", "--protocol", "netconf"])
    assert result.exit_code == 2
    assert result.stderr.endswith("which is not installed; run pip install 'orchestrrl[netconf]'\n")
    assert result.stderr.startswith("--protocol: netconf needs ")


@pytest.mark.parametrize(
    ("protocol", "quirk", "fault"),
    [
        ("calient_rest", "bulk_s=abc", "--quirk bulk_s: must be a number, got 'abc'"),
        ("calient_rest", "sessions=true", "--quirk sessions: must be a whole number, got True"),
        ("restconf", "any_to_any=maybe", "--quirk any_to_any: must be true or false, got 'maybe'"),
        ("netconf", "base=[1]", "--quirk base: must be 1.0 or 1.1, got [1]"),
    ],
)
def test_quirk_value_has_the_type_of_its_default(protocol: str, quirk: str, fault: str) -> None:
    refused = CliRunner().invoke(application(), ["ocs", "emulate", "--protocol", protocol, "--quirk", quirk])
    assert (refused.exit_code, refused.stderr.strip()) == (2, fault)


def test_string_quirk_that_looks_like_another_yaml_type() -> None:
    quirks = yaml.safe_load("{revision: 2017-08-04, base: 1.0}")
    make_emulator("netconf", DevicePanel(), **quirks)


def test_all_errors_of_one_scheduled_fault_are_reported(tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {at_s: x, kind: fail_prt, items: true}\n")
    refused = CliRunner().invoke(application(), ["ocs", "emulate", "--faults", str(faults)])
    assert refused.exit_code == 2
    shown = refused.stderr.splitlines()
    named = [line.partition(":")[0] for line in shown]
    assert named == [f"--faults[0].{name}" for name in ("at_s", "kind", "items")], refused.stderr
