import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application

runner = CliRunner()


def test_all_invalid_options_are_reported_at_once() -> None:
    result = runner.invoke(
        application(), ["engine", "simulated", "--alpha-s", "-1", "--speed", "0", "--max-num-seqs", "0"]
    )
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["alpha_s", "max_num_seqs", "speed"]
    assert lines[0].endswith("got -1.0")


def test_cache_too_small_for_one_request_is_rejected() -> None:
    result = runner.invoke(application(), ["engine", "simulated", "--kv-capacity-tokens", "100"])
    assert result.exit_code == 2
    assert "kv_capacity_tokens must hold max_model_len_tokens" in result.stderr


def test_invalid_length_model_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "lengths.yaml"
    file.write_text(json.dumps({"quantiles": [0, 1], "tokens": [0, "many"], "correlation": 2}))
    result = runner.invoke(application(), ["engine", "simulated", "--lengths", str(file)])
    assert result.exit_code == 2
    assert "lengths.tokens[1]" in result.stderr
    missing = runner.invoke(application(), ["engine", "simulated", "--lengths", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 2
    assert "lengths: cannot read" in missing.stderr


def test_invalid_layouts_and_faults_are_reported_as_given() -> None:
    given = ["--tensor-parallel-size", "0", "--start-delay-s", "-1", "--misreport", "tp=x", "--misreport", "sp=1"]
    result = runner.invoke(application(), ["engine", "simulated", *given])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        "tensor_parallel_size",
        "start_delay_s",
        "misreport.tp",
        "misreport.sp.[key]",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [(["--fail-start"], "the engine failed to start"), (["--weights", "/nowhere"], "/nowhere: ")],
)
def test_engine_that_cannot_start_reports_the_reason(given: list[str], words: str) -> None:
    result = runner.invoke(application(), ["engine", "simulated", *given])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(words)


def test_help_shows_an_example() -> None:
    result = runner.invoke(application(), ["engine", "simulated", "--help"])
    assert result.exit_code == 0
    assert "orchestrrl engine simulated --port 8100" in result.stdout
