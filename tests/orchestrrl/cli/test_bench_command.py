"""`orchestrrl bench`: its help lists all benchmarks; a benchmark that cannot run here reports the reason."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.bench import bench
from orchestrrl.cli.main import application
from orchestrrl.lab.bench import run
from orchestrrl.lab.bench.run import BENCHMARKS


def test_help_names_every_benchmark() -> None:
    shown = " ".join((bench.__doc__ or "").split()).partition("Benchmarks: ")[2].partition(".")[0]
    assert sorted(shown.split(", ")) == sorted(BENCHMARKS)


def test_benchmark_without_its_environment_reports_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "VLLM_PYTHON", tmp_path / "none")
    words = ["bench", "--only", "recorder", "--out", str(tmp_path / "bench.json"), "--json"]
    result = CliRunner().invoke(application(), words)
    assert result.exit_code == 0
    assert result.stdout.split() == ["{", '"benchmarks":', "[]", "}"]
    assert "recorder: skipped" in result.stderr
    assert "make venv-vllm" in result.stderr
