"""`orchestrrl fabric transition` as a process: results on standard output, errors on standard error."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrrl.cli.command import read_example
from orchestrrl.cli.main import application

CONTRACT_EXAMPLE = Path(__file__).parents[4] / "shared" / "contracts" / "fabric_transition.json"

EXAMPLE = read_example("fabric_transition")


def run(*arguments: str, document: object | None = None) -> Result:
    text = None if document is None else json.dumps(document)
    return CliRunner().invoke(application(), ["fabric", "transition", *arguments], input=text)


def part(switch: str, port_a: int, port_b: int) -> dict[str, Any]:
    return {"switch": switch, "port_a": port_a, "port_b": port_b}


def test_json_output_is_only_the_result_object() -> None:
    result = run("-", "--json", document=EXAMPLE)
    assert (result.exit_code, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    # The only circuit of tor2-tor3 remains until another is up.
    assert shown["stages"] == [
        {"remove": [part("ocs0", 1, 3), part("ocs0", 2, 4)], "add": [part("ocs1", 5, 7)]},
        {"remove": [part("ocs0", 5, 7)], "add": [part("ocs0", 1, 5), part("ocs0", 3, 7)]},
    ]
    assert (shown["dark_pairs"], shown["thin_endpoints"]) == ([], [])
    assert (shown["stages_at_least"], shown["fewest_suffer"]) == (2, True)
    assert [(point["stage"], point["kind"], point["circuits"]) for point in shown["points"]] == [
        (0, "start", 4),
        (1, "removed", 2),
        (1, "added", 3),
        (2, "removed", 2),
        (2, "added", 4),
    ]
    assert shown["points"][1]["least"] == {"endpoint": "tor0", "circuits": 1, "of": 2}


def test_contract_example() -> None:
    if not CONTRACT_EXAMPLE.is_file():
        pytest.skip(f"{CONTRACT_EXAMPLE} is not there")
    assert json.loads(CONTRACT_EXAMPLE.read_text()) == EXAMPLE
    assert run(str(CONTRACT_EXAMPLE), "--json").stdout == run("-", "--json", document=EXAMPLE).stdout


def test_printed_example_is_a_valid_problem() -> None:
    printed = run("--print-example")
    assert run("-", "--json", document=json.loads(printed.stdout)).exit_code == 0


def test_result_is_independent_of_list_and_port_order() -> None:
    turned = {
        **EXAMPLE,
        "switches": EXAMPLE["switches"][::-1],
        "current": [part(each["switch"], each["port_b"], each["port_a"]) for each in EXAMPLE["current"][::-1]],
        "target": EXAMPLE["target"][::-1],
    }
    assert run("-", "--json", document=turned).stdout == run("-", "--json", document=EXAMPLE).stdout


def test_dark_pairs_and_thin_endpoints_are_listed() -> None:
    ports = {"a": [1, 2], "b": [3, 4]}
    document = {
        "switches": [{"id": "s", "ports": ports}],
        "current": [part("s", 1, 3)],
        "target": [part("s", 1, 4)],
        "max_moves_per_stage": 2,
        "min_fraction": 1,
    }
    shown = json.loads(run("-", "--json", document=document).stdout)
    assert (shown["dark_pairs"], shown["thin_endpoints"]) == ([{"a": "a", "b": "b"}], ["a", "b"])
    assert "dark pairs: a-b; thin endpoints: a, b" in run("-", document=document).stdout


def test_output_without_json_is_a_table() -> None:
    result = run("-", document=EXAMPLE)
    assert result.exit_code == 0
    for words in ("2 stages (the minimum)", "-ocs0:1-3 -ocs0:2-4", "+ocs1:5-7", "tor0 1 of 2", "dark pairs: none"):
        assert words in result.stdout


def test_names_are_not_parsed_as_markup() -> None:
    document = json.loads(json.dumps(EXAMPLE).replace("tor3", "[red]").replace("ocs0", "[bold]"))
    document["min_fraction"] = 1
    shown = run("-", document=document).stdout
    assert "-[bold]:1-3" in shown
    assert "[red]" in shown


def test_empty_site_needs_no_stages() -> None:
    empty = {"switches": [], "current": [], "target": [], "max_moves_per_stage": 1, "min_fraction": 0}
    assert json.loads(run("-", "--json", document=empty).stdout)["stages"] == []
    assert run("-", document=empty).exit_code == 0


def test_all_errors_are_reported_at_once() -> None:
    document = {
        "switches": [{"id": "s", "ports": {"a": [1, 1, 4], "b": [2, "x"], "c": [2, 3]}}, {"id": "s", "ports": {}}],
        "current": [part("t", 1, 2), part("s", 1, 1), part("s", 2, 9), part("s", 3, 2), part("s", 1, 4)],
        "target": [{"switch": "s", "port_a": -1}, part("s", 1, 4)],
        "max_moves_per_stage": 0,
        "min_fraction": 1.5,
        "colour": "red",
    }
    result = run("-", "--json", document=document)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "switches[0].ports.b[1]: should be a valid integer, got 'x'",
        "target[0].port_a: should be greater than or equal to 0, got -1",
        "target[0].port_b: is missing, got nothing",
        "max_moves_per_stage: should be greater than or equal to 1, got 0",
        "min_fraction: should be less than or equal to 1, got 1.5",
        "colour: is not a known field, got 'red'",
        "switches[1].id: is already used by switches[0].id, got 's'",
        "switches[0].ports.a[1]: is already fibred by switches[0].ports.a[0], got 1",
        "switches[0].ports.c[0]: is already fibred by switches[0].ports.b[0], got 2",
        "current[0].switch: does not exist, got 't'",
        "current[1].port_b: is already used by current[1].port_a, got 1",
        "current[2].port_b: must have a fibre on 's', got 9",
        "current[3].port_b: is already used by current[2].port_a, got 2",
        "current[4].port_a: is already used by current[1].port_a, got 1",
        "current[4]: must join two endpoints, got two ports of 'a'",
        "target[0].port_a: must have a fibre on 's', got -1",
        "target[1]: must join two endpoints, got two ports of 'a'",
    ]


@pytest.mark.parametrize("shape", [[], 3, {"switches": [3, {"id": 1, "ports": 2}], "current": [[], {"switch": []}]}])
def test_malformed_document_is_reported_without_traceback(shape: object) -> None:
    result = run("-", "--json", document=shape)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr
