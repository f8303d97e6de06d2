"""Tests of `orchestrrl plan solve` with invalid input: all faults at once with path and value, or the limit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solve_problems import Json, engines, one_kind, problem, request
from typer.testing import CliRunner, Result

from orchestrrl.cli.main import application

CONFIGURATION = ("configurations", 0)
LINE = re.compile(r"^[^ :][^:]*: .+, got .+$")


def good() -> Json:
    return problem(
        16,
        8,
        engines(),
        current=one_kind(16, 8, engines()[2]),
        requests=[
            request("r0", 600, 256, "i0", "running"),
            request("r1", 637, 512, "i1", "waiting"),
            request("r2", 640, 9000),
            request("r3", 10, 800, "i2", "running"),
            request("r4", 10, 800, "i3", "running"),
            request("r5", 10, 800, "i3", "running"),
        ],
        kv_balance={"mu": 0.5, "delta": 0.2},
    )


def run(text: str | bytes) -> Result:
    return CliRunner().invoke(application(), ["plan", "solve", "-", "--json"], input=text)


def faults_of(text: str | bytes) -> list[str]:
    result = run(text)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert lines
    assert all(LINE.match(line) for line in lines), lines
    return lines


def names(lines: list[str], path: str, got: object) -> bool:
    """Return whether one of the lines names the field or an element of it and shows the value."""
    about = [line for line in lines if re.match(re.escape(path) + r"(\[\d+\])*: ", line)]
    return any(got is ... or repr(got) in line.partition(", got ")[2] for line in about)


def put(*path: str | int, value: Any) -> Callable[[Json], None]:
    def change(document: Json) -> None:
        inner: Any = document
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value

    return change


def path_of(*path: str | int) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


# (path, value set there, value shown; ...: any). No two change the same field of the same object.
FAULTS: list[tuple[tuple[str | int, ...], Any, Any]] = [
    (("colour",), "red", "red"),
    (("gpus", "nodes"), 2, 2),
    (("gpus", "count"), -16, -16),
    (("gpus", "count"), 16.5, 16.5),
    (("gpus", "count"), True, True),
    (("gpus", "count"), "16", "16"),
    (("gpus", "per_node"), 0, 0),
    (("gpus", "per_node"), None, None),
    (("gpus", "count"), 10**12, 10**12),
    (("gpus", "per_node"), 10**30, 10**30),
    (("configurations", 0, "gpus"), 10**30, 10**30),
    (("configurations",), {}, ...),
    (("configurations", 0), [], ...),
    (("configurations", 0, "gpus"), 0, 0),
    (("configurations", 0, "gpus"), -1, -1),
    (("configurations", 0, "alpha_s"), -0.5, -0.5),
    (("configurations", 0, "beta_s"), "fast", "fast"),
    (("configurations", 0, "gamma_s"), -1e-9, -1e-9),
    (("configurations", 0, "kv_capacity_tokens"), -1, -1),
    (("configurations", 0, "kv_capacity_tokens"), 10.5, 10.5),
    (("configurations", 0, "max_sequences"), -7, -7),
    (("configurations", 0, "prefill_tokens_per_s"), -1.0, -1.0),
    (("configurations", 0, "prefill_tokens_per_s"), 0, ...),
    (("configurations", 0, "switch_s"), -2, -2),
    (("configurations", 0, "speed"), 1, 1),
    (("configurations", 0, "id"), 3, 3),
    (("configurations", 3, "id"), "tp1", "tp1"),
    (("kv_bytes_per_token",), -1, -1),
    (("transfer",), None, None),
    (("transfer", "latency_s"), -0.1, -0.1),
    (("transfer", "inter_node_gbps_per_gpu"), -200, -200),
    (("current", 0, "configuration"), "tp3", "tp3"),
    (("current", 1, "id"), "i0", "i0"),
    (("current", 1, "gpus"), [4, 5, 6, 99], 99),
    (("current", 1, "gpus"), [-1, 5, 6, 7], -1),
    (("current", 1, "gpus"), [4, 5, 6, 6], ...),
    (("current", 1, "gpus"), [3, 4, 5, 6], ...),
    (("current", 1, "gpus"), [4, 5, 6], ...),
    (("current", 1, "gpus"), [4, 5, 6, "7"], "7"),
    (("current", 1, "gpus"), 4, 4),
    (("requests", 0, "context_tokens"), -600, -600),
    (("requests", 0, "remaining_tokens"), 0, 0),
    (("requests", 0, "remaining_tokens"), -3, -3),
    (("requests", 0, "state"), "sleeping", "sleeping"),
    (("requests", 0, "priority"), 1, 1),
    (("requests", 0, "instance"), "ghost", "ghost"),
    (("requests", 1, "context_tokens"), "many", "many"),
    (("requests", 3, "id"), "r1", "r1"),
    (("requests", 4), 5, 5),
    (("kv_balance", "mu"), "half", "half"),
    (("kv_balance", "delta"), -0.1, -0.1),
    (("kv_balance", "sigma"), 1, 1),
    (("epsilon_s",), -1, -1),
    (("epsilon_s",), None, None),
    (("work_budget",), -1, -1),
    (("work_budget",), "much", "much"),
    (("time_budget_s",), -1, -1),
]


def test_valid_problem_is_accepted() -> None:
    assert run(json.dumps(good())).exit_code == 0
    assert run(json.dumps(good() | {"work_budget": 10**6, "time_budget_s": 30})).exit_code == 0


@pytest.mark.parametrize(("where", "value", "shown"), FAULTS, ids=[f"{path_of(*w)}={v!r}" for w, v, _ in FAULTS])
def test_a_fault_is_named_with_its_path_and_value(where: tuple[str | int, ...], value: Any, shown: Any) -> None:
    document = good()
    put(*where, value=value)(document)
    lines = faults_of(json.dumps(document))
    assert names(lines, path_of(*where), shown), lines


@pytest.mark.parametrize(
    ("place", "instance", "state"),
    [(2, "i0", "new"), (0, None, "running"), (1, None, "waiting")],
    ids=["new with an instance", "running without", "waiting without"],
)
def test_an_instance_is_null_for_new_requests_only(place: int, instance: str | None, state: str) -> None:
    document = good()
    document["requests"][place].update(instance=instance, state=state)
    (line,) = faults_of(json.dumps(document))
    assert re.match(rf"requests\[{place}\]\.(instance|state): ", line)


@pytest.mark.parametrize(
    "where",
    [
        ("gpus",),
        ("gpus", "count"),
        ("current", 0, "gpus"),
        ("requests", 2, "instance"),
        ("configurations", 1, "switch_s"),
        ("transfer", "latency_s"),
        ("kv_balance", "mu"),
        ("requests",),
        ("epsilon_s",),
        ("current",),
    ],
    ids=lambda where: path_of(*where),
)
def test_missing_fields_are_named(where: tuple[str | int, ...]) -> None:
    document = good()
    inner: Any = document
    for part in where[:-1]:
        inner = inner[part]
    del inner[where[-1]]
    assert names(faults_of(json.dumps(document)), path_of(*where), ...)


# Fields that other checks depend on, and faults of these checks, which may be hidden while such a field is wrong.
LEANT_ON = {("gpus", "count"), ("gpus", "per_node"), ("configurations",), ("configurations", 0), (*CONFIGURATION, "id")}
LEANING = {("current", 1, "gpus"), ("configurations", 3, "id")}


@given(st.lists(st.sampled_from(FAULTS), min_size=2, max_size=12))
def test_all_faults_are_reported_at_once(chosen: list[tuple[tuple[str | int, ...], Any, Any]]) -> None:
    document, there = good(), {}
    leaning = LEANING if any(where in LEANT_ON for where, _, _ in chosen) else set()
    for where, value, shown in chosen:
        inside = any(where[: len(other)] == other or other[: len(where)] == where for other in there)
        if not inside and where not in leaning:
            put(*where, value=value)(document)
            there[where] = shown
    lines = faults_of(json.dumps(document)) if there else []
    assert [path_of(*where) for where, shown in there.items() if not names(lines, path_of(*where), shown)] == [], lines


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ['"epsilon_s": 0.5', '"latency_s": 0.002', '"switch_s": 1.6', '"mu": 0.5'])
def test_numbers_are_finite(field: str, number: str) -> None:
    text = json.dumps(good())
    assert field in text
    lines = faults_of(text.replace(field, f"{field.partition(':')[0]}: {number}", 1))
    assert any(field.split('"')[1] in line for line in lines)


def test_a_key_given_twice_is_a_fault() -> None:
    lines = faults_of(json.dumps(good()).replace('"epsilon_s": 0.5', '"epsilon_s": 0.5, "epsilon_s": 0.7'))
    assert names(lines, "epsilon_s", 0.7)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", b"\xff\xfe", "[" * 100_000, "{}", '{"gpus": 3}'])
def test_input_that_is_no_problem_is_rejected(text: str | bytes) -> None:
    faults_of(text)


def test_missing_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be shortened in the message
    result = CliRunner().invoke(application(), ["plan", "solve", "absent.json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "absent.json" in result.stderr


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.sampled_from(["i0", "tp1", "r0", "new", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "gpus", "count"]), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(good())), JUNK, max_size=4))
def test_no_document_causes_a_traceback(junk: Json) -> None:
    result = run(json.dumps(good() | junk))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if result.exit_code:
        assert result.stdout == ""
        assert result.exit_code in (2, 3)


# --- valid but infeasible


def limit_of(document: Json) -> str:
    result = run(json.dumps(document))
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def test_request_larger_than_any_engine_is_infeasible() -> None:
    configurations = engines(capacity_share=0.01)  # 27,801 tokens at most
    document = problem(8, 8, configurations, requests=[request("r0", 10, 10), request("r1", 30_000, 1)])
    line = limit_of(document)
    assert re.search(r"2200\b", line)  # by how much
    assert re.search(r"30001\b", line)
    assert re.search(r"27801\b", line)


def test_engine_with_room_but_without_gpus_is_excluded() -> None:
    """The widest engine does not fit on 4 GPUs, so its capacity does not count."""
    document = problem(4, 8, engines(capacity_share=0.01), requests=[request("r0", 20_000, 1)])
    assert re.search(r"6848\b", limit_of(document))  # more than the 13,153 tokens of 4 GPUs


def test_problem_without_enough_gpus_for_any_engine_is_infeasible() -> None:
    line = limit_of(problem(4, 8, engines()[3:], requests=[request("r0", 10, 1)]))
    assert "4" in line
    assert "8" in line


def test_last_node_that_is_too_small_is_not_used() -> None:
    """12 GPUs do not contain two nodes of 8."""
    wide = {**engines()[3], "id": "tp16", "gpus": 16}
    limit_of(problem(12, 8, [wide], requests=[request("r0", 10, 1)]))
    limit_of(problem(6, 2, [{**wide, "gpus": 3}], requests=[request("r0", 10, 1)]))
