"""`orchestrrl profile score` and `fit`: tables, JSON and errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.engines.profiles.silicon import COLUMNS

ROWS = (
    "trtllm,1.0,Qwen/Qwen3-32B,h100_sxm,fp8,fp8,fp8,1024,256,16,2,1,,1,1,12.5",
    "trtllm,1.0,Qwen/Qwen3-32B,h100_sxm,fp8,fp8,fp8,1024,256,16,4,1,,1,1,9",
    "trtllm,1.0,made/up,h100_sxm,fp8,fp8,fp8,1024,256,16,4,1,,1,1,9",
)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    path = tmp_path / "measured.csv"
    path.write_text("\n".join([",".join(COLUMNS), *ROWS]) + "\n")
    return path


def test_json_output_is_only_the_result_object(measured: Path) -> None:
    result = CliRunner().invoke(application(), ["profile", "score", str(measured), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert list(report) == ["rows", "predicted", "overall", "groups", "tp_ratios", "not_predicted", "predictions"]
    assert report["overall"]["dense"]["ratio"]["pairs"] == 1
    assert {row["source"] for row in report["predictions"]} == {"roofline"}


def test_output_has_tables_and_unpredicted_rows(measured: Path) -> None:
    result = CliRunner().invoke(application(), ["profile", "score", str(measured)])
    assert result.exit_code == 0, result.output
    assert "TPOT of 2 of 3 rows" in result.stdout
    assert "dense, TP 2 to 4" in result.stdout
    assert "not predicted: row 3 (made/up): unknown model 'made/up'" in result.stdout


def test_all_errors_are_reported_at_once(measured: Path) -> None:
    measured.write_text(measured.read_text().replace("12.5", "fast").replace("1024", "0", 1))
    result = CliRunner().invoke(application(), ["profile", "score", str(measured), "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "row[1].isl: must be >= 1, got '0'",
        "row[1].silicon_tpot_ms: should be a number, got 'fast'",
    ]


def test_errors_of_source_and_file_are_reported_together(measured: Path) -> None:
    shown = CliRunner().invoke(application(), ["profile", "score", str(measured), "--source", "measured"])
    assert shown.exit_code == 0, shown.output
    assert "TPOT of 0 of 3 rows" in shown.stdout
    assert (
        "too few measurements: a fit requires at least 8 rows whose lengths differ from those of the predicted rows, "
        "got 0" in shown.stdout
    )
    measured.write_text(measured.read_text().replace("12.5", "fast"))
    wrong = CliRunner().invoke(application(), ["profile", "score", str(measured), "--source", "guess"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.splitlines() == [
        "--source: must be one of roofline, measured, got 'guess'",
        "row[1].silicon_tpot_ms: should be a number, got 'fast'",
    ]


def test_fit_writes_an_importable_module(measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "fitted.py"
    result = CliRunner().invoke(application(), ["profile", "fit", str(measured), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    written: dict[str, object] = {}
    exec(out.read_text(), written)
    assert list(written["FITTED"]) == ["", "qwen3-32b"]  # type: ignore[call-overload]
    assert (written["FITTED_TO"], written["LEFT_OUT_ROWS"]) == ("measured.csv", 2)
    assert (report["out"], report["rows"], list(report["sets"])) == (str(out), 2, ["", "qwen3-32b"])


def test_fit_rejects_empty_data_and_unwritable_output(measured: Path, tmp_path: Path) -> None:
    nowhere = ["--out", str(tmp_path / "no" / "fitted.py")]
    result = CliRunner().invoke(application(), ["profile", "fit", str(measured), *nowhere])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("--out: cannot write ")
    measured.write_text("\n".join([",".join(COLUMNS), ROWS[2]]) + "\n")
    result = CliRunner().invoke(application(), ["profile", "fit", str(measured)])
    assert (result.exit_code, result.stderr) == (
        2,
        f"(document): must contain at least one row whose step times can be predicted, got none in {measured}\n",
    )
