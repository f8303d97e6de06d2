"""Offline problems: all errors at once, with path and value, for documents of any shape."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from orchestrrl.cli.problem import ProblemPart, ids_exist, infeasible, read_problem, unique, values_at
from orchestrrl.cli.problems import BALANCE_CHECKS, BalanceDocument
from orchestrrl.core.errors import ProblemFaults


class Leaf(ProblemPart):
    id: str
    tokens: int = Field(ge=0)
    parent: str | None


class Tree(ProblemPart):
    share: float = Field(ge=0)
    roots: list[str]
    leaves: list[Leaf]


CHECKS_OF_TREE = (unique("roots[]"), unique("leaves[].id"), ids_exist("leaves[].parent", "roots[]"))


def faults_of_text(tmp_path: Path, text: str | bytes) -> list[str]:
    path = tmp_path / "problem.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ProblemFaults) as caught:
        read_problem(str(path), Tree, CHECKS_OF_TREE)
    return caught.value.faults


def test_valid_problem_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"share": 1, "roots": ["a"], "leaves": [{"id": "x", "tokens": 3, "parent": "a"}]}
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))
    expected = Tree(share=1.0, roots=["a"], leaves=[Leaf(id="x", tokens=3, parent="a")])
    assert read_problem(str(path), Tree, CHECKS_OF_TREE) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert read_problem("-", Tree, CHECKS_OF_TREE) == expected


def test_all_errors_are_reported_with_path_and_value(tmp_path: Path) -> None:
    text = """{"share": NaN, "share": "0.5", "roots": ["a", 7, "a"], "colour": "red", "leaves": [
        {"id": "x", "tokens": -3, "parent": "a"},
        {"id": "x", "tokens": true, "parent": "missing"},
        {"id": "y", "tokens": "12", "parent": null},
        {"id": "z", "tokens": 1.5, "id": "y"},
        null]}"""
    assert faults_of_text(tmp_path, text) == [
        "share: must be given only once, got '0.5' again",
        "leaves[3].id: must be given only once, got 'y' again",
        "share: should be a valid number, got '0.5'",
        "roots[1]: should be a valid string, got 7",
        "leaves[0].tokens: should be greater than or equal to 0, got -3",
        "leaves[1].tokens: should be a valid integer, got True",
        "leaves[2].tokens: should be a valid integer, got '12'",
        "leaves[3].tokens: should be a valid integer, got 1.5",
        "leaves[3].parent: is missing, got nothing",
        "leaves[4]: should be an object, got None",
        "colour: is not a known field, got 'red'",
        "roots[2]: is already used by roots[0], got 'a'",
        "leaves[1].id: is already used by leaves[0].id, got 'x'",
        "leaves[3].id: is already used by leaves[2].id, got 'y'",
        "leaves[1].parent: does not exist, got 'missing'",
    ]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_rejected(tmp_path: Path, number: str) -> None:
    (fault,) = faults_of_text(tmp_path, f'{{"share": {number}, "roots": [], "leaves": []}}')
    assert fault.startswith("share: should be a finite number, got ")


@pytest.mark.parametrize("number", ["true", "null", '"1"', "[1]", "{}"])
def test_other_types_are_not_coerced_to_numbers(tmp_path: Path, number: str) -> None:
    (fault,) = faults_of_text(tmp_path, f'{{"share": {number}, "roots": [], "leaves": []}}')
    assert fault.startswith("share: should be a valid number, got ")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("", "(document): must be valid JSON, got '': Expecting value"),
        ("{", "(document): must be valid JSON, got '{': "),
        ('{"a": 1} 2', "(document): must be valid JSON, got '{\"a\": 1} 2': Extra data"),
        (b"\xff\xfe\xff", "(document): must be valid JSON, got "),
        ("[1]", "(document): should be an object, got [1]"),
        ("null", "(document): should be an object, got None"),
        ("[" * 100_000, "(document): must not be nested too deeply, got '[[["),
        ('{"share": ' + "1" * 5000 + "}", "(document): must be valid JSON, got "),
    ],
)
def test_invalid_json_is_one_error(tmp_path: Path, text: str | bytes, start: str) -> None:
    (fault,) = faults_of_text(tmp_path, text)
    assert fault.startswith(start)
    assert "\n" not in fault


def test_newline_in_a_name_does_not_split_the_error(tmp_path: Path) -> None:
    faults = faults_of_text(tmp_path, r'{"share": 1, "roots": [], "leaves": [], "a\nb": "c\nd"}')
    assert faults == [r"a\nb: is not a known field, got 'c\nd'"]


def test_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path is shortened in the message
    for path in ("absent.json", "."):
        with pytest.raises(ProblemFaults, match=r"^\(document\): cannot be read from ") as caught:
            read_problem(path, Tree)
        assert repr(path) in str(caught.value)


def test_values_at_skips_other_shapes() -> None:
    document: Any = {"a": [{"b": 1}, 3, {"c": 2}, {"b": [4]}], "b": 5}
    assert list(values_at(document, "a[].b")) == [(("a", 0, "b"), 1), (("a", 3, "b"), [4])]
    assert list(values_at(document, "a[].b[]")) == [(("a", 3, "b", 0), 4)]
    assert list(values_at(document, "b")) == [(("b",), 5)]
    assert list(values_at([1, 2], "a")) == []


def test_infeasible_names_the_limit_and_the_shortfall(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        infeasible("KV capacity", needed=120, available=100, unit="tokens")
    assert caught.value.exit_code == 3
    assert capsys.readouterr() == ("", "infeasible: KV capacity: 20 tokens short (120 needed, 100 available)\n")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["theta", "workers", "id", "running", "waiting", "context_tokens"]), inner)
    ),
    max_leaves=20,
)


@given(JUNK)
def test_no_document_causes_a_traceback(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.json"
    path.write_text(json.dumps(document))
    problem, faults = None, [""]
    try:
        problem = read_problem(str(path), BalanceDocument, BALANCE_CHECKS)
    except ProblemFaults as error:
        faults = error.faults
    assert problem is not None or all(": " in fault for fault in faults)
