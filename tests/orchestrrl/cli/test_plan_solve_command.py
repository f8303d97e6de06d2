"""`orchestrrl plan solve` as a process. The meaning of its values is tested with the contract."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrrl.cli.main import application

CONTRACT_EXAMPLE = Path(__file__).parents[4] / "shared" / "contracts" / "plan_problem.json"

CONFIGURATIONS = [
    {
        "id": f"tp{gpus}",
        "gpus": gpus,
        "alpha_s": alpha_s,
        "beta_s": 8e-5,
        "gamma_s": 8e-8 / gpus,
        "kv_capacity_tokens": 200_000 * gpus,
        "max_sequences": 1024,
        "prefill_tokens_per_s": 9000.0 * gpus,
        "switch_s": 2.0,
    }
    for gpus, alpha_s in ((2, 0.0184), (8, 0.0143))
]


def request(name: str, remaining: int, instance: str | None = "i0", state: str = "running") -> dict[str, Any]:
    return {
        "id": name,
        "context_tokens": 500,
        "remaining_tokens": remaining,
        "instance": instance,
        "state": state,
    }


def problem(**changed: Any) -> dict[str, Any]:
    return {
        "gpus": {"count": 16, "per_node": 8},
        "configurations": CONFIGURATIONS,
        "kv_bytes_per_token": 196_608,
        "transfer": {"inter_node_gbps_per_gpu": 200, "intra_node_gbps_per_gpu": 1600, "latency_s": 0.002},
        "current": [{"id": f"i{n}", "configuration": "tp2", "gpus": [2 * n, 2 * n + 1]} for n in range(8)],
        "requests": [request(f"r{n}", 400 * (n + 1)) for n in range(24)],
        "kv_balance": None,
        "epsilon_s": 0.5,
        **changed,
    }


def run(*arguments: str, document: object | None = None) -> Result:
    text = None if document is None else json.dumps(document)
    return CliRunner().invoke(application(), ["plan", "solve", *arguments], input=text)


def test_json_output_is_only_the_result_object() -> None:
    result = run("-", "--json", document=problem())
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["decision"] in ("reconfigure", "rebalance")
    assert found["lower_bound_s"] <= found["makespan_s"] < found["current_makespan_s"] - 0.5
    assert found["gap"] == found["makespan_s"] / found["lower_bound_s"] - 1
    placed = [name for each in found["instances"] for name in each["requests"]]
    assert sorted(placed) == sorted(f"r{n}" for n in range(24))


def test_no_gain_keeps_the_current_placement() -> None:
    found = json.loads(run("-", "--json", document=problem(epsilon_s=1e6)).stdout)
    assert (found["decision"], found["migrations"]) == ("keep", [])
    assert found["instances"][0]["requests"] == [f"r{n}" for n in range(24)]
    assert found["makespan_s"] == found["current_makespan_s"]


def test_output_without_json_is_a_table() -> None:
    result = run("-", document=problem())
    assert result.exit_code == 0
    for words in ("Instances", "makespan", "lower bound", "running requests move"):
        assert words in result.stdout


def test_many_instances_are_grouped() -> None:
    crowd = problem(
        gpus={"count": 128, "per_node": 8},
        current=[],
        requests=[request(f"r{n}", 2000, None, "new") for n in range(6000)],
    )
    result = run("-", document=crowd)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if " new " in line]
    assert 0 < len(rows) < 5
    assert sum(int(row[1]) for row in rows) > 24, "engines, in the second column"


def test_budgets_bound_the_search() -> None:
    for budget in ({"work_budget": 0}, {"work_budget": 5000}, {"time_budget_s": 0.0}):
        found = json.loads(run("-", "--json", document=problem(**budget)).stdout)
        assert found["makespan_s"] >= found["lower_bound_s"]


def test_all_errors_are_reported_at_once() -> None:
    faulty = problem(
        current=[
            {"id": "i0", "configuration": "tp2", "gpus": [0, 0]},
            {"id": "i0", "configuration": "tp4", "gpus": [2, 99]},
            {"id": "i2", "configuration": "tp2", "gpus": [7, 8]},
            {"id": "i3", "configuration": "tp8", "gpus": [9]},
        ],
        requests=[
            request("a", -5),
            request("a", 5, "gone"),
            request("b", 5, "i0", "new"),
            request("c", 5, None, "waiting"),
            {**request("d", 5), "state": "asleep", "colour": "red"},
        ],
        epsilon_s=-1,
        work_budget=1.5,
    )
    result = run("-", "--json", document=faulty)
    assert (result.exit_code, result.stdout) == (2, "")
    faults = result.stderr.splitlines()
    paths = [fault.partition(":")[0] for fault in faults]
    for path in (
        "epsilon_s",
        "work_budget",
        "requests[0].remaining_tokens",
        "requests[4].state",
        "requests[4].colour",
        "current[1].id",
        "requests[1].id",
        "current[1].configuration",
        "requests[1].instance",
        "requests[2].instance",
        "requests[3].instance",
        "current[0].gpus[1]",
        "current[1].gpus[1]",
        "current[2].gpus",
        "current[3].gpus",
    ):
        assert path in paths, path
    assert all(", got " in fault for fault in faults)
    assert len(faults) == len(set(faults))


@pytest.mark.parametrize("document", [[], 7, None, {"gpus": 3, "current": [7], "requests": [[]]}])
def test_malformed_document_is_reported_without_traceback(document: object) -> None:
    result = run("-", document=document)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_infeasible_problem_names_the_limit() -> None:
    result = run("-", "--json", document=problem(requests=[request("a", 2_000_000)]))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "kv_capacity_tokens" in result.stderr
    assert "400500 tokens short" in result.stderr


def test_problem_without_requests_keeps_the_fleet() -> None:
    found = json.loads(run("-", "--json", document=problem(requests=[])).stdout)
    assert (found["decision"], found["makespan_s"], found["gap"]) == ("keep", 0.0, 0.0)


@pytest.mark.shared
def test_contract_example() -> None:
    if not CONTRACT_EXAMPLE.exists():
        pytest.skip(f"{CONTRACT_EXAMPLE} is missing: it is stored outside the repository")
    found = json.loads(run(str(CONTRACT_EXAMPLE), "--json").stdout)
    assert found["gap"] < 0.02


def test_example_has_a_gain() -> None:
    shown = run("--print-example")
    assert shown.exit_code == 0
    solved = run("-", "--json", document=json.loads(shown.output))
    assert solved.exit_code == 0
    assert json.loads(solved.output)["decision"] == "reconfigure"
