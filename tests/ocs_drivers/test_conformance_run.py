"""The suite without pytest, on a shared switch and only between named ports."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import carry_out, refusal
from ocs_drivers.conformance_run import LabConformance, LabTestOutcome, LabTestState, parse_ports, run_suite
from ocs_drivers.errors import CircuitConflict, InvalidOptions
from ocs_drivers.model import CircuitDiff, CommitResult, CrossConnect
from ocs_drivers.registry import make_driver
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.cli.main import application
from orchestrrl.rpc.ocs_server import serve_driver

PORTS = parse_ports("1-4:17,18,19,20")
THEIRS, OWN = CrossConnect(9, 25), CrossConnect(10, 26)
OF_THE_PROCESS = {"make_foreign": "the process owns what its clients make"}


@asynccontextmanager
async def lab(switch: VirtualSwitch) -> AsyncIterator[LabConformance]:
    """Serve one device to every driver that the suite makes."""
    server, port = await serve_driver(switch, "127.0.0.1:0")
    yield LabConformance(partial(make_driver, "grpc", "lab", {"target": f"127.0.0.1:{port}"}), PORTS, OF_THE_PROCESS)
    await server.stop(None)


def virtual(kind: type[VirtualSwitch] = VirtualSwitch) -> VirtualSwitch:
    return kind("served", reconfiguration_s=0.002, link_timeout_s=0.2)


async def outcomes(suite: LabConformance, *only: str) -> dict[str, LabTestOutcome]:
    return {outcome.name: outcome async for outcome in run_suite(suite, only)}


async def test_shared_switch_keeps_other_circuits() -> None:
    switch = virtual()
    switch.model.add([THEIRS])
    await carry_out(switch, (OWN,))
    async with lab(switch) as suite:
        found = await outcomes(suite)
    failed = {name: outcome.detail for name, outcome in found.items() if outcome.state is LabTestState.FAILED}
    assert failed == {}
    assert found["test_overwrite_leaves_only_named_circuits"].detail.startswith("the driver owns other circuits")
    assert found["test_plan_refuses_failed_port"].state is LabTestState.SKIPPED
    assert found["test_other_changes_are_refused_during_trial"].state is LabTestState.PASSED
    assert found["test_rollback_restores_from_every_prefix"].state is LabTestState.PASSED
    assert len([outcome for outcome in found.values() if outcome.state is LabTestState.PASSED]) >= 20
    assert (await switch.cross_connects()).cross_connects == {THEIRS, OWN}
    assert (await switch.cross_connects()).foreign == {THEIRS}
    sent = {pair for setter in switch.model.setters for pair in setter.split()[1:]} - {str(OWN)}
    ports = {int(port) for pair in sent for port in pair.split(":")}
    assert ports == {1, 2, 3, 4, 17, 18, 19, 20}


async def test_ports_in_use_are_refused_before_the_first_command() -> None:
    switch = virtual()
    switch.model.add([CrossConnect(2, 30)])
    async with lab(switch) as suite:
        async with refusal(CircuitConflict, "2:30", "disconnect it first"):
            await outcomes(suite)
    assert switch.model.setters == []


async def test_missing_ports_are_all_reported() -> None:
    async with lab(virtual()) as suite:
        suite._pairs = parse_ports("1,2,40,41:17,18,19,3")
        async with refusal(
            InvalidOptions,
            "ingress_port: must be within 1..16, got 40",
            "got 41",
            "ports[3].egress_port",
            "17..32, got 3",
        ):
            await outcomes(suite)


class Liar(VirtualSwitch):
    """A switch whose `rollback` reports success without doing anything."""

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        return CommitResult((), 0, 0)


async def test_wrong_result_of_driver_fails_test_and_ports_are_freed() -> None:
    switch = virtual(Liar)
    name = "test_verify_distinguishes_missing_from_lingering"
    async with lab(switch) as suite:
        found = await outcomes(suite, "test_rollback_restores_from_every_prefix", name)
    assert found["test_rollback_restores_from_every_prefix"].state is LabTestState.FAILED
    assert "of conformance.py: assert" in found["test_rollback_restores_from_every_prefix"].detail
    assert found[name].state is LabTestState.PASSED
    assert (await switch.cross_connects()).circuits == ()


async def test_change_outside_named_ports_is_not_sent() -> None:
    class Astray(LabConformance):
        async def pairs(self, driver: OcsDriver, count: int) -> tuple[CrossConnect, ...]:
            return (*PORTS[: count - 1], CrossConnect(16, 32))[:count]

    switch = virtual()
    async with lab(switch) as suite:
        found = await outcomes(Astray(suite._make, PORTS, OF_THE_PROCESS), "test_diff_is_empty_after_commit")
    assert "must only change circuits on the named ports, got" in found["test_diff_is_empty_after_commit"].detail
    assert switch.model.setters == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("1,2,3", "must be INGRESS:EGRESS"),
        ("1,2,x,4:5-8", "each a list of ports"),
        ("1-4:5-7", "same number of ports on both sides, got 4 and 3"),
        ("1-3:5-7", "at least 4 ports"),
        ("1,1,2,3:5-8", "must name each port once, got 1 twice"),
    ],
)
def test_parse_ports_refuses_malformed_text(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_ports(text)


def conformance(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["ocs", "conformance", *arguments])


def test_command_prints_table_and_json() -> None:
    arguments = ("--driver", "virtual", "--free-ports", "1-4:17-20", "--only", "test_plan_sends_nothing")
    result = conformance(*arguments)
    assert result.exit_code == 0, result.output
    assert "virtual: 1 passed, 0 failed, 0 skipped" in result.stdout
    report = json.loads(conformance(*arguments, "--json").stdout)
    assert (report["passed"], report["failed"], report["tests"][0]["name"]) == (1, 0, "test_plan_sends_nothing")


def test_command_reports_every_fault_of_its_input() -> None:
    result = conformance("--driver", "grpc", "--free-ports", "1:2", "--option", "x", "--only", "test_all")
    assert result.exit_code == 2
    for fault in (
        "--free-ports: must have at least 4",
        "--option: must be NAME=VALUE",
        "--only: must be one of",
        "--address: is missing",
    ):
        assert fault in result.stderr
    unknown = conformance("--driver", "scpi", "--free-ports", "1-4:5-8", "--option", "adress=192.0.2.1")
    assert unknown.exit_code == 2
    assert [fault.partition(":")[0] for fault in unknown.stderr.splitlines()] == ["--address", "--option adress"]


def test_only_accepts_names_shown_in_table() -> None:
    result = conformance("--driver", "virtual", "--free-ports", "1-4:17-20", "--only", "plan_sends_nothing")
    assert result.exit_code == 0, result.output
    assert "virtual: 1 passed" in result.stdout
