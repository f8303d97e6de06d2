"""`orchestrrl sync plan` as a process. The quality of its plans is tested with the planner."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrrl.cli.main import application

CONTRACT_EXAMPLE = Path(__file__).parents[4] / "shared" / "contracts" / "sync_problem.json"


def problem(**changed: Any) -> dict[str, Any]:
    return {
        "link_gbps": 200,
        "pods": [
            {"id": "train", "role": "train", "boundary_circuits": 1},
            {"id": "gen", "role": "gen", "boundary_circuits": 1},
        ],
        "endpoints": [
            {"id": "t0", "pod": "train", "tor": "train-tor", "nic_gbps": 200},
            {"id": "g0", "pod": "gen", "tor": "gen-tor", "nic_gbps": 200},
            {"id": "g1", "pod": "gen", "tor": "gen-tor", "nic_gbps": 200},
        ],
        "tor_circuits": {"train-tor": 1, "gen-tor": 1},
        "shards": [{"id": "all", "bytes": 25_000_000_000, "holders": ["t0"], "receivers": ["g0", "g1"]}],
        "seeds_per_pod": 1,
        "chunk_bytes": 25_000_000,
        "hop_latency_s": 0.001,
        **changed,
    }


def run(*arguments: str, document: object | None = None) -> Result:
    text = None if document is None else json.dumps(document)
    return CliRunner().invoke(application(), ["sync", "plan", *arguments], input=text)


def answer(**changed: Any) -> dict[str, Any]:
    result = run("-", "--json", document=problem(**changed))
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    assert found.pop("solve_s") > 0
    return found


def test_json_output_is_only_the_result_object() -> None:
    found = answer()
    (wave,) = found["waves"]
    crossing, inside = wave["edges"]
    whole = {"shard": "all", "offset": 0, "bytes": 25_000_000_000}
    rate_gbps = crossing.pop("rate_gbps")
    assert {*crossing.items()} >= {*whole.items(), ("src", "t0"), ("phase", "A"), ("circuits", 1)}
    assert {*inside.items()} >= {*whole.items(), ("src", crossing["dst"]), ("phase", "B"), ("circuits", 0)}
    assert inside.pop("rate_gbps") <= rate_gbps <= 200
    assert wave["seconds"] == found["estimate_s"] == pytest.approx(1.002, rel=1e-6)  # plus one chunk and one hop
    assert (found["lower_bound_s"], found["naive_s"]) == (pytest.approx(1.0), pytest.approx(2.0))


def test_output_without_json_is_a_table() -> None:
    result = run("-", document=problem())
    assert result.exit_code == 0
    for words in ("1 waves of 2 edges", "1.00 times the bound", "2.0 times as long"):
        assert words in " ".join(result.stdout.split())


def test_nothing_to_send_is_reported() -> None:
    assert answer(shards=[]) == {"waves": [], "estimate_s": 0.0, "lower_bound_s": 0.0, "naive_s": 0.0}
    assert "Nothing to send" in run("-", document=problem(shards=[])).stdout
    assert answer(pods=[], endpoints=[], tor_circuits={}, shards=[])["waves"] == []


def test_holder_receives_nothing() -> None:
    held = [{"id": "all", "bytes": 9, "holders": ["t0", "g0"], "receivers": ["t0", "g0", "g1"]}]
    (wave,) = answer(shards=held)["waves"]
    assert {(edge["src"], edge["dst"]) for edge in wave["edges"]} == {("g0", "g1")}


def test_holders_without_circuits_are_infeasible() -> None:
    """The holders' PoDs need the shard, and so does a third PoD."""
    pods = [
        {"id": id, "role": role, "boundary_circuits": n}
        for id, role, n in (("a", "train", 0), ("b", "train", 0), ("c", "gen", 4))
    ]
    endpoints = [{"id": f"{pod}{n}", "pod": pod, "tor": f"{pod}-tor", "nic_gbps": 200} for pod in "abc" for n in (0, 1)]
    shards = [{"id": "s", "bytes": 10**9, "holders": ["a0", "b0"], "receivers": ["a1", "b1", "c0"]}]
    tors = {f"{pod}-tor": 4 for pod in "abc"}
    result = run("-", "--json", document=problem(pods=pods, endpoints=endpoints, shards=shards, tor_circuits=tors))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "infeasible: no circuit leads to the PoDs that need shards: " in result.stderr


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tor_circuits": {"train-tor": 1, "gen-tor": 0}}, "gen-tor"),
        ({"tor_circuits": {"train-tor": 0, "gen-tor": 1}}, "train-tor"),
        (
            {
                "pods": [
                    {"id": "train", "role": "train", "boundary_circuits": 1},
                    {"id": "gen", "role": "gen", "boundary_circuits": 0},
                ]
            },
            "gen",
        ),
    ],
)
def test_unreachable_receiver_is_infeasible(changed: dict[str, Any], named: str) -> None:
    result = run("-", "--json", document=problem(**changed))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "infeasible" in result.stderr
    assert named in result.stderr


def test_all_errors_are_reported_at_once() -> None:
    faulty = problem(
        link_gbps=0,
        pods=[
            {"id": "train", "role": "learner", "boundary_circuits": -1},
            {"id": "train", "role": "gen", "boundary_circuits": 1.5},
        ],
        endpoints=[
            {"id": "t0", "pod": "nowhere", "tor": "train-tor", "nic_gbps": 0},
            {"id": "t0", "pod": "train", "tor": "unknown", "nic_gbps": 200},
        ],
        tor_circuits={"train-tor": -1},
        shards=[
            {"id": "a", "bytes": 0, "holders": [], "receivers": ["t0", "t0", "t9"]},
            {"id": "a", "bytes": True, "holders": ["t8"], "receivers": []},
        ],
        seeds_per_pod=0,
        chunk_bytes=0,
        hop_latency_s=-1,
        colour="red",
    )
    result = run("-", "--json", document=faulty)
    assert (result.exit_code, result.stdout) == (2, "")
    faults = result.stderr.splitlines()
    assert {fault.partition(":")[0] for fault in faults} == {
        "link_gbps",
        "pods[0].role",
        "pods[0].boundary_circuits",
        "pods[1].id",
        "pods[1].boundary_circuits",
        "endpoints[0].pod",
        "endpoints[0].nic_gbps",
        "endpoints[1].id",
        "endpoints[1].tor",
        "tor_circuits.train-tor",
        "shards[0].bytes",
        "shards[0].holders",
        "shards[0].receivers[1]",
        "shards[0].receivers[2]",
        "shards[1].id",
        "shards[1].bytes",
        "shards[1].holders[0]",
        "seeds_per_pod",
        "chunk_bytes",
        "hop_latency_s",
        "colour",
    }
    assert all(", got " in fault for fault in faults)
    assert len(faults) == len(set(faults))


def test_only_given_links_are_used_at_their_rates() -> None:
    slow = answer(links=[{"a": "gen", "b": "train", "circuits": 1, "gbps": 10}])
    assert slow["estimate_s"] == pytest.approx(20.0, rel=0.01)
    assert slow["naive_s"] == pytest.approx(40.0)
    assert answer(links=None) == answer()
    result = run("-", document=problem(links=[]))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "PoD train has no circuits" in result.stderr


def test_pod_without_link_to_a_holder_is_reached_over_others() -> None:
    far = {"id": "far", "role": "gen", "boundary_circuits": 1}
    end = {"id": "f0", "pod": "far", "tor": "far-tor", "nic_gbps": 200}
    changed = {
        "pods": [*problem()["pods"][:1], {"id": "gen", "role": "gen", "boundary_circuits": 2}, far],
        "endpoints": [*problem()["endpoints"], end],
        "tor_circuits": {"train-tor": 1, "gen-tor": 1, "far-tor": 1},
        "shards": [{**problem()["shards"][0], "receivers": ["g0", "g1", "f0"]}],
        "links": [{"a": a, "b": b, "circuits": 1, "gbps": 100} for a, b in (("train", "gen"), ("far", "gen"))],
    }
    found = answer(**changed)
    assert found["naive_s"] is None
    assert {edge["src"][0] for wave in found["waves"] for edge in wave["edges"] if edge["dst"] == "f0"} == {"g"}
    assert "no direct links to all receivers" in " ".join(run("-", document=problem(**changed)).stdout.split())


def test_all_errors_of_links_are_reported_at_once() -> None:
    links = [
        {"a": "train", "b": "gen", "circuits": 0, "gbps": 0},
        {"a": "gen", "b": "train", "circuits": 1, "gbps": 1},
        {"a": "gen", "b": "gen", "circuits": 1, "gbps": 1},
        {"a": "gen", "b": "mars", "circuits": 1},
        7,
    ]
    result = run("-", document=problem(links=links))
    assert (result.exit_code, result.stdout) == (2, "")
    assert {fault.partition(":")[0] for fault in result.stderr.splitlines()} == {
        "links[0].circuits",
        "links[0].gbps",
        "links[1]",
        "links[2].b",
        "links[3].b",
        "links[3].gbps",
        "links[4]",
    }


def test_tor_in_two_pods_is_rejected() -> None:
    ends = problem()["endpoints"]
    ends[2]["tor"] = "train-tor"
    result = run("-", document=problem(endpoints=ends))
    assert result.exit_code == 2
    assert result.stderr.startswith("endpoints[2].tor: is already in PoD")


@pytest.mark.parametrize("document", [[], 7, None, "x", {"pods": 3, "endpoints": [7], "shards": [[]]}])
def test_malformed_document_is_reported_without_traceback(document: object) -> None:
    result = run("-", document=document)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("seed", range(60))
def test_corrupted_problem_is_reported_or_planned(seed: int) -> None:
    rng = random.Random(seed)
    document: Any = problem()
    for _ in range(rng.randint(1, 3)):
        spoil(document, rng)
    result = run("-", "--json", document=document)
    assert result.exit_code in (0, 2, 3), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.stderr
    if result.exit_code == 2:
        assert result.stderr
        assert all(": " in line for line in result.stderr.splitlines())


def spoil(document: Any, rng: random.Random) -> None:
    """Replace or delete a random part of the problem."""
    at = document
    while True:
        keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and rng.random() < 0.8:
            at = at[key]
            continue
        others: list[Any] = [None, 0, -1, 1.5, 1e300, 2**70, "", "t0", [], {}, [None], True, float("nan"), float("inf")]
        if rng.random() < 0.2:
            del at[key]
        elif rng.random() < 0.2 and isinstance(at, list):
            at.append(copy.deepcopy(at[key]))
        else:
            at[key] = rng.choice(others)
        return


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1e31"])
def test_invalid_sizes_are_rejected(number: str) -> None:
    text = json.dumps(problem()).replace('"bytes": 25000000000', f'"bytes": {number}')
    result = CliRunner().invoke(application(), ["sync", "plan", "-"], input=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "shards[0].bytes" in result.stderr


@pytest.mark.shared
def test_contract_example() -> None:
    if not CONTRACT_EXAMPLE.exists():
        pytest.skip(f"{CONTRACT_EXAMPLE} is missing: it is stored outside the repository")
    found = json.loads(run(str(CONTRACT_EXAMPLE), "--json").stdout)
    assert found["lower_bound_s"] == pytest.approx(0.588)
    assert found["estimate_s"] <= 1.05 * found["lower_bound_s"]
    assert found["naive_s"] == pytest.approx(2.352)


def test_example_has_a_gain_from_trees() -> None:
    shown = run("--print-example")
    assert shown.exit_code == 0
    solved = json.loads(run("-", "--json", document=json.loads(shown.output)).output)
    assert solved["lower_bound_s"] <= solved["estimate_s"] <= 1.35 * solved["lower_bound_s"]
    assert solved["naive_s"] > 2 * solved["estimate_s"]
