"""`orchestrrl fabric place` as a process. The optimality of placements is tested with the planner."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrrl.cli.main import application

CONTRACT_EXAMPLE = Path(__file__).parents[4] / "shared" / "contracts" / "fabric_place.json"


def problem(**changed: Any) -> dict[str, Any]:
    """Build a problem of three ToRs with two fibres to each of two switches."""
    ports = {f"tor{tor}": [2 * tor + 1, 2 * tor + 2] for tor in range(3)}
    return {
        "switches": [{"id": "ocs0", "ports": ports}, {"id": "ocs1", "ports": ports}],
        "circuits": [{"a": "tor1", "b": "tor0", "count": 2}, {"a": "tor1", "b": "tor2", "count": 1}],
        "current": [{"switch": "ocs1", "port_a": 4, "port_b": 1}, {"switch": "ocs0", "port_a": 1, "port_b": 5}],
        "failed_ports": {"ocs0": [6]},
        **changed,
    }


def run(*arguments: str, document: object | None = None) -> Result:
    text = None if document is None else json.dumps(document)
    return CliRunner().invoke(application(), ["fabric", "place", *arguments], input=text)


def lawful(asked: dict[str, Any], found: dict[str, Any]) -> None:
    """Check the contract's conditions on any result."""
    owners = {
        (switch["id"], port): endpoint
        for switch in asked["switches"]
        for endpoint, ports in switch["ports"].items()
        for port in ports
    }
    failed = {(switch, port) for switch, ports in asked["failed_ports"].items() for port in ports}
    used = [(each["switch"], each[side]) for each in found["cross_connects"] for side in ("port_a", "port_b")]
    assert len(used) == len(set(used))
    assert not failed & set(used)
    for each in found["cross_connects"]:
        assert list(each) == ["switch", "a", "b", "port_a", "port_b"]
        assert owners[each["switch"], each["port_a"]] == each["a"]
        assert owners[each["switch"], each["port_b"]] == each["b"]
    short = {(each["a"], each["b"]): each["count"] for each in found["unplaced"]}
    for wanted in asked["circuits"]:
        ends = (wanted["a"], wanted["b"])
        placed = sum((each["a"], each["b"]) == ends for each in found["cross_connects"])
        assert placed + short.pop(ends, 0) == wanted["count"]
    assert not short
    there = {(each["switch"], frozenset((each["port_a"], each["port_b"]))) for each in found["cross_connects"]}
    stay = [each for each in asked["current"] if (each["switch"], frozenset((each["port_a"], each["port_b"]))) in there]
    assert found["kept"] == stay


def test_json_output_is_only_the_result_object() -> None:
    result = run("-", "--json", document=problem())
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found) == ["cross_connects", "kept", "unplaced"]
    lawful(problem(), found)
    assert found["kept"] == [{"switch": "ocs1", "port_a": 4, "port_b": 1}]
    assert found["unplaced"] == []


def test_endpoints_and_ports_keep_the_order_of_the_problem() -> None:
    found = json.loads(run("-", "--json", document=problem(failed_ports={"ocs0": [1, 2, 3, 4]})).stdout)
    joined = {(each["a"], each["port_a"], each["port_b"]) for each in found["cross_connects"] if each["b"] == "tor0"}
    assert joined == {("tor1", 4, 1), ("tor1", 3, 2)}


def test_circuits_without_free_ports_are_unplaced() -> None:
    asked = problem(circuits=[{"a": "tor2", "b": "tor0", "count": 6}, {"a": "tor0", "b": "tor1", "count": 0}])
    found = json.loads(run("-", "--json", document=asked).stdout)
    lawful(asked, found)
    assert found["unplaced"] == [{"a": "tor2", "b": "tor0", "count": 3}]


def test_output_without_json_is_a_table() -> None:
    result = run("-", document=problem(circuits=[{"a": "tor0", "b": "tor1", "count": 9}]))
    assert result.exit_code == 0
    for words in ("4 of 9 circuits", "1 stay, 3 new, 1 removed", "this placement is optimal", "Switches", "Changes"):
        assert words in result.stdout
    assert "tor0 - tor1" in result.stdout.partition("Unplaced")[2]


def test_cross_connect_on_a_failed_port_is_removed() -> None:
    asked = problem(failed_ports={"ocs1": [1]})
    found = json.loads(run("-", "--json", document=asked).stdout)
    lawful(asked, found)
    assert found["kept"] == []


def test_same_input_gives_identical_output() -> None:
    assert run("-", "--json", document=problem()).stdout == run("-", "--json", document=problem()).stdout


def test_all_errors_are_reported_at_once() -> None:
    faulty = problem(
        switches=[
            {"id": "ocs0", "ports": {"tor0": [1, 1], "tor1": [2, 3], "tor2": [3, -1]}},
            {"id": "ocs0", "ports": {}, "colour": "red"},
        ],
        circuits=[
            {"a": "tor0", "b": "tor1", "count": -1},
            {"a": "tor1", "b": "tor0", "count": 1},
            {"a": "tor2", "b": "tor2", "count": 1},
            {"a": "tor0", "b": "tor9", "count": 1.5},
        ],
        current=[
            {"switch": "ocs0", "port_a": 1, "port_b": 2},
            {"switch": "ocs0", "port_a": 2, "port_b": 7},
            {"switch": "ocs7", "port_a": 1, "port_b": 1},
            {"switch": "ocs0"},
        ],
        failed_ports={"ocs0": [3, 8, 3], "ocs8": [1], "ocs1": "all"},
    )
    result = run("-", "--json", document=faulty)
    assert (result.exit_code, result.stdout) == (2, "")
    faults = result.stderr.splitlines()
    paths = [fault.partition(":")[0] for fault in faults]
    for path in (
        "switches[0].ports.tor0[1]",
        "switches[0].ports.tor2[0]",
        "switches[0].ports.tor2[1]",
        "switches[1].id",
        "switches[1].colour",
        "circuits[0].count",
        "circuits[1]",
        "circuits[2].b",
        "circuits[3].b",
        "circuits[3].count",
        "current[1].port_a",
        "current[1].port_b",
        "current[2].switch",
        "current[2].port_b",
        "current[3].port_a",
        "current[3].port_b",
        "failed_ports.ocs0[1]",
        "failed_ports.ocs0[2]",
        "failed_ports.ocs8",
        "failed_ports.ocs1",
    ):
        assert path in paths, path
    assert all(", got " in fault for fault in faults)
    assert len(faults) == len(set(faults))


@pytest.mark.parametrize(
    "document",
    [
        [],
        7,
        None,
        {"switches": 3, "current": [7], "circuits": [[]], "failed_ports": []},
        {"switches": [{"ports": [1]}]},
    ],
)
def test_malformed_document_is_reported_without_traceback(document: object) -> None:
    result = run("-", document=document)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.shared
def test_contract_example() -> None:
    if not CONTRACT_EXAMPLE.exists():
        pytest.skip(f"{CONTRACT_EXAMPLE} is missing: it is stored outside the repository")
    asked = json.loads(CONTRACT_EXAMPLE.read_text())
    found = json.loads(run(str(CONTRACT_EXAMPLE), "--json").stdout)
    lawful(asked, found)
    assert (found["kept"], found["unplaced"]) == (asked["current"], [])


def test_example_keeps_and_changes_cross_connects() -> None:
    shown = run("--print-example")
    assert shown.exit_code == 0
    asked = json.loads(shown.stdout)
    found = json.loads(run("-", "--json", document=asked).stdout)
    lawful(asked, found)
    assert 0 < len(found["kept"]) < len(asked["current"])
    assert found["unplaced"] == []
