"""`orchestrrl balance` as a process: results on standard output, errors on standard error."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrrl.cli.main import application

CONTRACT_EXAMPLE = Path(__file__).parents[4] / "shared" / "contracts" / "balance_snapshot.json"

FLEET: dict[str, Any] = {
    "theta": 0.001,
    "workers": [
        {
            "id": "w1",
            "running": [],
            "waiting": [],
            "kv_capacity_tokens": 6000,
            "kv_free_tokens": 6000,
            "max_sequences": 16,
            "decode_tokens_per_s": None,
        },
        {
            "id": "w0",
            "running": [{"id": "a", "context_tokens": 900}],
            "waiting": [{"id": "c", "context_tokens": 300}],
            "kv_capacity_tokens": 6000,
            "kv_free_tokens": 0,
            "max_sequences": 16,
            "decode_tokens_per_s": 100,
        },
    ],
}


def run(*arguments: str, document: object | None = None) -> Result:
    text = None if document is None else json.dumps(document)
    return CliRunner().invoke(application(), ["balance", *arguments], input=text)


def test_json_output_is_only_the_result_object() -> None:
    result = run("-", "--json", document=FLEET)
    assert (result.exit_code, result.stderr) == (0, "")
    # Finally w1 runs both, with 4800 tokens free and a mean of 600 per request: a cap of 10.
    assert json.loads(result.stdout) == {
        "load_index": {"w1": {"before": 0.0, "after": 2 / 10 / 100}, "w0": {"before": 0.02, "after": 0.0}},
        "spread_before": 0.02,
        "spread_after": 2 / 10 / 100,
        "migrations": [
            {"request": "c", "from": "w0", "to": "w1", "state": "waiting"},
            {"request": "a", "from": "w0", "to": "w1", "state": "running"},
        ],
        "stopped_because": "no_feasible_move",
    }


def test_same_input_gives_identical_output(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(FLEET))
    assert run(str(path), "--json").stdout == run("-", "--json", document=FLEET).stdout


def test_output_without_json_is_a_table() -> None:
    result = run("-", document=FLEET)
    assert result.exit_code == 0
    for word in ("Load index", "w0", "w1", "Moves, in order", "waiting", "Spread"):
        assert word in result.stdout


def test_stalled_worker_has_no_load_index() -> None:
    stalled = {**FLEET["workers"][1], "decode_tokens_per_s": 0}
    document = {"theta": 0, "workers": [{**stalled, "running": [{"id": "a", "context_tokens": 900}], "waiting": []}]}
    result = json.loads(run("-", "--json", document=document).stdout)
    assert result["load_index"] == {"w0": {"before": None, "after": None}}
    assert (result["spread_before"], result["spread_after"]) == (None, None)
    assert "stalled" in run("-", document=document).stdout


def test_all_errors_are_reported_at_once() -> None:
    workers = [
        {**FLEET["workers"][1], "max_sequences": -1, "colour": "red"},
        {**FLEET["workers"][1], "kv_free_tokens": "many", "waiting": [{"id": "a", "context_tokens": True}]},
    ]
    result = run("-", "--json", document={"theta": -1, "workers": workers})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "theta: should be greater than or equal to 0, got -1",
        "workers[0].max_sequences: should be greater than or equal to 0, got -1",
        "workers[0].colour: is not a known field, got 'red'",
        "workers[1].waiting[0].context_tokens: should be a valid integer, got True",
        "workers[1].kv_free_tokens: should be a valid integer, got 'many'",
        "workers[1].id: is already used by workers[0].id, got 'w0'",
        "workers[1].running[0].id: is already used by workers[0].running[0].id, got 'a'",
        "workers[1].waiting[0].id: is already used by workers[0].running[0].id, got 'a'",
    ]


def test_missing_file_is_reported_without_traceback(tmp_path: Path) -> None:
    result = run(str(tmp_path / "absent.json"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "absent.json': No such file or directory" in result.stderr


def test_empty_fleet_is_balanced() -> None:
    assert json.loads(run("-", "--json", document={"theta": 0, "workers": []}).stdout) == {
        "load_index": {},
        "spread_before": 0.0,
        "spread_after": 0.0,
        "migrations": [],
        "stopped_because": "within_theta",
    }
    assert run("-", document={"theta": 0, "workers": []}).exit_code == 0


def test_help_shows_an_example() -> None:
    assert "orchestrrl balance fleet.json" in run("--help").stdout


@pytest.mark.shared
def test_contract_example() -> None:
    if not CONTRACT_EXAMPLE.exists():
        pytest.skip(f"{CONTRACT_EXAMPLE} is missing: it is stored outside the repository")
    result = json.loads(run(str(CONTRACT_EXAMPLE), "--json").stdout)
    assert [move["request"] for move in result["migrations"]] == ["c", "d", "a"]
    assert result["load_index"]["w0"] == {"before": 4 / 2 / 180, "after": 1 / 1 / 180}
