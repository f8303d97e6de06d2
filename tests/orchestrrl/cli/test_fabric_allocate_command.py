"""`orchestrrl fabric allocate` as a process. The quality of its results is tested with the planner."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrrl.cli.main import application

CONTRACT_EXAMPLE = Path(__file__).parents[4] / "shared" / "contracts" / "fabric_problem.json"


def problem(**changed: Any) -> dict[str, Any]:
    return {
        "link_gbps": 200,
        "endpoints": [{"id": name, "ports": 4} for name in ("tor0", "tor1", "tor2")],
        "demand": [
            {"src": "tor1", "dst": "tor0", "bytes": 40e9},
            {"src": "tor0", "dst": "tor1", "bytes": 10e9},
            {"src": "tor1", "dst": "tor2", "bytes": 20e9},
        ],
        "eligible": None,
        "failed_ports": {"tor2": 1},
        **changed,
    }


def run(*arguments: str, document: object | None = None) -> Result:
    text = None if document is None else json.dumps(document)
    return CliRunner().invoke(application(), ["fabric", "allocate", *arguments], input=text)


def answer(**changed: Any) -> dict[str, Any]:
    result = run("-", "--json", document=problem(**changed))
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    assert found.pop("solve_s") > 0
    return found


def test_json_output_is_only_the_result_object() -> None:
    assert answer() == {
        "circuits": [{"a": "tor0", "b": "tor1", "count": 3}, {"a": "tor1", "b": "tor2", "count": 1}],
        "completion_s": 20e9 * 8 / 200e9,
        "unserved": [],
        "uniform_completion_s": 40e9 * 8 / 2 / 200e9,
    }


def test_repeated_demand_is_added() -> None:
    twice = [{"src": "tor0", "dst": "tor1", "bytes": 10e9}] * 3 + [{"src": "tor1", "dst": "tor0", "bytes": 25e9}]
    assert answer(demand=twice)["completion_s"] == 30e9 * 8 / 4 / 200e9


@pytest.mark.parametrize("pair", [["tor1", "tor0"], {"a": "tor0", "b": "tor1"}])
def test_only_eligible_pairs_get_circuits(pair: object) -> None:
    found = answer(eligible=[pair, pair])
    assert found["circuits"] == [{"a": "tor0", "b": "tor1", "count": 4}]
    assert found["unserved"] == [["tor1", "tor2"]]
    assert answer(eligible=[])["circuits"] == []


def test_more_failed_ports_than_ports_leave_none() -> None:
    found = answer(failed_ports={"tor1": 9})
    assert (found["circuits"], found["completion_s"]) == ([], 0.0)
    assert found["unserved"] == [["tor0", "tor1"], ["tor1", "tor2"]]


def test_empty_demand_needs_no_circuits() -> None:
    nothing = {"circuits": [], "completion_s": 0.0, "unserved": [], "uniform_completion_s": 0.0}
    assert answer(demand=[]) == nothing
    assert answer(demand=[{"src": "tor0", "dst": "tor1", "bytes": 0}]) == nothing
    assert answer(endpoints=[], demand=[], failed_ports={}) == nothing


def test_output_without_json_is_a_table() -> None:
    result = run("-", "--bipartite", document=problem(failed_ports={"tor2": 4}))
    assert result.exit_code == 0
    for words in (
        "4 circuits",
        "the slowest ends after 400 ms",
        "divided evenly over the pairs",
        "Unserved",
        "tor1 - tor2",
    ):
        assert words in result.stdout


def test_slowest_of_many_pairs_are_shown() -> None:
    crowd = problem(
        endpoints=[{"id": f"t{n}", "ports": 2} for n in range(200)],
        demand=[{"src": f"t{n}", "dst": f"t{n + 1}", "bytes": 1e9 * (n + 1)} for n in range(0, 200, 2)],
        failed_ports={},
    )
    shown = run("-", document=crowd).stdout
    assert "The 60 slowest of 100 pairs" in shown
    assert "t198" in shown
    assert "t0 " not in shown


def test_all_errors_are_reported_at_once() -> None:
    faulty = problem(
        link_gbps=0,
        endpoints=[{"id": "tor0", "ports": -1}, {"id": "tor0", "ports": 2.5}, {"id": "tor1", "ports": 4, "rack": 7}],
        demand=[
            {"src": "tor0", "dst": "tor9", "bytes": -5},
            {"src": "tor1", "dst": "tor1", "bytes": 1},
            {"src": "tor8", "dst": "tor0", "bytes": True},
            {"src": "tor0", "dst": "tor1"},
        ],
        eligible=[["tor0", "tor7"], ["tor1"], ["tor1", "tor1"], {"a": "tor6", "b": "tor0"}],
        failed_ports={"tor5": 1, "tor1": -1},
        colour="red",
    )
    result = run("-", "--json", document=faulty)
    assert (result.exit_code, result.stdout) == (2, "")
    faults = result.stderr.splitlines()
    assert {fault.partition(":")[0] for fault in faults} == {
        "link_gbps",
        "endpoints[0].ports",
        "endpoints[1].id",
        "endpoints[1].ports",
        "endpoints[2].rack",
        "demand[0].dst",
        "demand[0].bytes",
        "demand[1].dst",
        "demand[2].src",
        "demand[2].bytes",
        "demand[3].bytes",
        "eligible[0][1]",
        "eligible[1]",
        "eligible[2]",
        "eligible[3].a",
        "failed_ports.tor5",
        "failed_ports.tor1",
        "colour",
    }
    assert all(", got " in fault for fault in faults)
    assert len(faults) == len(set(faults))


@pytest.mark.parametrize(
    "document",
    [[], 7, None, {"endpoints": 3, "demand": [7], "eligible": [7, {}, [[]]], "failed_ports": []}],
)
def test_malformed_document_is_reported_without_traceback(document: object) -> None:
    result = run("-", document=document)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1e31"])
def test_invalid_sizes_are_rejected(number: str) -> None:
    text = json.dumps(problem()).replace("40000000000.0", number)
    result = CliRunner().invoke(application(), ["fabric", "allocate", "-"], input=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "demand[0].bytes" in result.stderr


def test_extreme_sizes_and_rates_give_finite_numbers() -> None:
    sizes = [{"src": "tor0", "dst": "tor1", "bytes": 1e30}, {"src": "tor0", "dst": "tor2", "bytes": 5e-324}]
    assert answer(link_gbps=1e-9, demand=sizes)["completion_s"] == pytest.approx(1e30 * 8 / 3)


@pytest.mark.shared
def test_contract_example() -> None:
    if not CONTRACT_EXAMPLE.exists():
        pytest.skip(f"{CONTRACT_EXAMPLE} is missing: it is stored outside the repository")
    found = json.loads(run(str(CONTRACT_EXAMPLE), "--json").stdout)
    assert found["circuits"] == [
        {"a": "tor0", "b": "tor1", "count": 5},
        {"a": "tor0", "b": "tor2", "count": 1},
        {"a": "tor2", "b": "tor3", "count": 5},
    ]
    assert found["completion_s"] == pytest.approx(0.32)


def test_example_has_too_few_ports() -> None:
    shown = run("--print-example")
    assert shown.exit_code == 0
    solved = run("-", "--json", document=json.loads(shown.output))
    found = json.loads(solved.output)
    assert len(found["unserved"]) == 1
    assert found["completion_s"] <= found["uniform_completion_s"]
