"""`orchestrrl bench`: its report, its table and its errors."""

import json
from pathlib import Path

from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.lab.bench.run import BENCHMARKS

FIELDS = ("name", "value", "unit", "baseline", "baseline_value", "ratio", "note")


def test_report_is_written_and_printed(tmp_path: Path) -> None:
    path = tmp_path / "out" / "bench.json"
    result = CliRunner().invoke(application(), ["bench", "--only", "balancer_tick", "--json", "--out", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert json.loads(result.stdout) == report
    assert {tuple(figure) for figure in report["benchmarks"]} == {FIELDS}
    assert report["benchmarks"][0]["name"] == "balancer_tick"
    assert result.stderr == "balancer_tick ...\n"


def test_output_without_json_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = CliRunner().invoke(application(), ["bench", "--only", "plan_tick", "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert "half the requests" in result.stdout
    assert f"wrote {path}" in result.stdout


def test_all_unknown_benchmarks_are_reported() -> None:
    result = CliRunner().invoke(application(), ["bench", "--only", "nonsense", "--only", "more"])
    assert result.exit_code == 2
    faults = result.stderr.splitlines()
    assert [line.rpartition("got ")[2] for line in faults] == ["'more'", "'nonsense'"]
    assert all(", ".join(BENCHMARKS) in line for line in faults)


def test_help_names_every_benchmark() -> None:
    text = CliRunner().invoke(application(), ["bench", "--help"], env={"COLUMNS": "200"}).stdout
    assert all(name in text for name in BENCHMARKS)
