import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application

DEADLINE_S = 120.0

runner = CliRunner()


def test_every_wrong_option_is_named_at_once() -> None:
    result = runner.invoke(
        application(), ["engine", "simulated", "--alpha-s", "-1", "--speed", "0", "--max-num-seqs", "0"]
    )
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["alpha_s", "max_num_seqs", "speed"]
    assert lines[0].endswith("got -1.0")


def test_a_cache_that_cannot_hold_one_request_is_named() -> None:
    result = runner.invoke(application(), ["engine", "simulated", "--kv-capacity-tokens", "100"])
    assert result.exit_code == 2
    assert "kv_capacity_tokens must hold one request" in result.stderr


def test_a_wrong_length_model_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lengths.yaml"
    file.write_text(json.dumps({"quantiles": [0, 1], "tokens": [0, "many"], "correlation": 2}))
    result = runner.invoke(application(), ["engine", "simulated", "--lengths", str(file)])
    assert result.exit_code == 2
    assert "lengths.tokens[1]" in result.stderr
    missing = runner.invoke(application(), ["engine", "simulated", "--lengths", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 2
    assert "lengths: cannot be read" in missing.stderr


def test_wrong_layouts_and_faults_are_named_as_they_were_given() -> None:
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
    [(["--fail-start"], "the engine was told to fail"), (["--weights", "/nowhere"], "/nowhere/simulated.json: cannot")],
)
def test_an_engine_that_cannot_start_says_why_and_ends(given: list[str], words: str) -> None:
    result = runner.invoke(application(), ["engine", "simulated", *given])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(words)


def started(*given: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrrl", "engine", "simulated", *given]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("given", [(), ("--hang",)])
def test_an_engine_ends_when_it_is_told_to(given: tuple[str, ...]) -> None:
    process = started(*given)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert process.communicate()[1] == ""


def test_an_engine_ends_also_before_it_listens() -> None:
    process = started("--start-delay-s", "3600")
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=3.0)  # by then it waits; where the machine is slower it has no handler yet
    process.terminate()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (out, err) == ("", "")


def test_help_shows_an_example() -> None:
    result = runner.invoke(application(), ["engine", "simulated", "--help"])
    assert result.exit_code == 0
    assert "orchestrrl engine simulated --port 8100" in result.stdout
