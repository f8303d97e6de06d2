"""Offline problems: every fault at once, with path and value, whatever shape the document has."""

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


def test_a_good_problem_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"share": 1, "roots": ["a"], "leaves": [{"id": "x", "tokens": 3, "parent": "a"}]}
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))
    expected = Tree(share=1.0, roots=["a"], leaves=[Leaf(id="x", tokens=3, parent="a")])
    assert read_problem(str(path), Tree, CHECKS_OF_TREE) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert read_problem("-", Tree, CHECKS_OF_TREE) == expected


def test_all_faults_come_at_once_with_path_and_value(tmp_path: Path) -> None:
    text = """{"share": NaN, "share": "0.5", "roots": ["a", 7, "a"], "colour": "red", "leaves": [
        {"id": "x", "tokens": -3, "parent": "a"},
        {"id": "x", "tokens": true, "parent": "nobody"},
        {"id": "y", "tokens": "12", "parent": null},
        {"id": "z", "tokens": 1.5, "id": "y"},
        null]}"""
    assert faults_of_text(tmp_path, text) == [
        "share: is given more than once, got '0.5'",
        "leaves[3].id: is given more than once, got 'y'",
        "share: should be a valid number, got '0.5'",
        "roots[1]: should be a valid string, got 7",
        "leaves[0].tokens: should be greater than or equal to 0, got -3",
        "leaves[1].tokens: should be a valid integer, got True",
        "leaves[2].tokens: should be a valid integer, got '12'",
        "leaves[3].tokens: should be a valid integer, got 1.5",
        "leaves[3].parent: is missing, got nothing",
        "leaves[4]: should be an object, got None",
        "colour: is not a known field, got 'red'",
        "roots[2]: is used already by roots[0], got 'a'",
        "leaves[1].id: is used already by leaves[0].id, got 'x'",
        "leaves[3].id: is used already by leaves[2].id, got 'y'",
        "leaves[1].parent: does not exist, got 'nobody'",
    ]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(tmp_path: Path, number: str) -> None:
    (fault,) = faults_of_text(tmp_path, f'{{"share": {number}, "roots": [], "leaves": []}}')
    assert fault.startswith("share: should be a finite number, got ")


@pytest.mark.parametrize("number", ["true", "null", '"1"', "[1]", "{}"])
def test_nothing_else_passes_for_a_number(tmp_path: Path, number: str) -> None:
    (fault,) = faults_of_text(tmp_path, f'{{"share": {number}, "roots": [], "leaves": []}}')
    assert fault.startswith("share: should be a valid number, got ")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("", "(document): is not valid JSON: Expecting value"),
        ("{", "(document): is not valid JSON: "),
        ('{"a": 1} 2', "(document): is not valid JSON: Extra data"),
        (b"\xff\xfe\xff", "(document): is not valid JSON: "),
        ("[1]", "(document): should be an object, got [1]"),
        ("null", "(document): should be an object, got None"),
        ("[" * 100_000, "(document): is nested too deeply, got '[[["),
        ('{"share": ' + "1" * 5000 + "}", "(document): is not valid JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_problem_at_all_is_one_fault(tmp_path: Path, text: str | bytes, start: str) -> None:
    (fault,) = faults_of_text(tmp_path, text)
    assert fault.startswith(start)
    assert "\n" not in fault


def test_a_name_that_breaks_the_line_does_not_break_the_fault(tmp_path: Path) -> None:
    faults = faults_of_text(tmp_path, r'{"share": 1, "roots": [], "leaves": [], "a\nb": "c\nd"}')
    assert faults == [r"a\nb: is not a known field, got 'c\nd'"]


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path may be too long to be told whole
    for path in ("absent.json", "."):
        with pytest.raises(ProblemFaults, match=r"^\(document\): cannot be read: ") as caught:
            read_problem(path, Tree)
        assert repr(path) in str(caught.value)


def test_values_at_passes_over_what_has_another_shape() -> None:
    document: Any = {"a": [{"b": 1}, 3, {"c": 2}, {"b": [4]}], "b": 5}
    assert list(values_at(document, "a[].b")) == [(("a", 0, "b"), 1), (("a", 3, "b"), [4])]
    assert list(values_at(document, "a[].b[]")) == [(("a", 3, "b", 0), 4)]
    assert list(values_at(document, "b")) == [(("b",), 5)]
    assert list(values_at([1, 2], "a")) == []


def test_an_infeasible_problem_names_the_limit_and_by_how_much_it_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        infeasible("KV capacity", needed=120, available=100, unit="tokens")
    assert caught.value.exit_code == 3
    assert capsys.readouterr() == ("", "infeasible: KV capacity: 20 tokens short (120 needed, 100 there)\n")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["theta", "workers", "id", "running", "waiting", "context_tokens"]), inner)
    ),
    max_leaves=20,
)


@given(JUNK)
def test_no_document_at_all_makes_a_traceback(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.json"
    path.write_text(json.dumps(document))
    problem, faults = None, [""]
    try:
        problem = read_problem(str(path), BalanceDocument, BALANCE_CHECKS)
    except ProblemFaults as error:
        faults = error.faults
    assert problem is not None or all(": " in fault for fault in faults)
