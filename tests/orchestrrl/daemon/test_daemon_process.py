"""Tests of `orchestrrl daemon` and `check-config` as processes: addresses, signals, exit statuses, a kill and a
restart."""

from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.config.example import EXAMPLE


def run(*arguments: str) -> Any:
    """Run a command that exits on its own, in this process."""
    return CliRunner().invoke(application(), list(arguments))


def test_all_config_faults_are_reported_at_once_with_status_2(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mode: maybe\nfast: {theta: -1}\nocs: [{id: a}]")
    for command in (("daemon", "-c", str(path)), ("check-config", str(path))):
        done = run(*command)
        assert (done.exit_code, done.stdout) == (2, ""), done.stderr
        assert done.stderr.splitlines() == [
            "mode: should be 'advise' or 'act', got 'maybe'",
            "fast.theta: must be >= 0, got -1",
            "ocs[0].driver: is missing, got nothing",
        ]


def test_check_config_prints_a_valid_example(tmp_path: Path) -> None:
    printed = run("check-config", "--print-example")
    assert (printed.exit_code, printed.stdout) == (0, EXAMPLE)
    path = tmp_path / "c.yaml"
    path.write_text(printed.stdout)
    assert "no errors" in run("check-config", str(path)).stdout
    understood = yaml.safe_load(run("check-config", str(path), "--json").stdout)
    assert understood["fleet"]["engines"][0]["gpus"] == [0, 1]
    assert run("check-config").exit_code == 2


def test_switch_driver_faults_are_configuration_faults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("ocs: [{id: a, driver: nobodys}, {id: b, driver: virtual, options: {colour: red}}]")
    for command in (("daemon", "-c", str(path)), ("check-config", str(path))):
        done = run(*command)
        assert (done.exit_code, done.stdout) == (2, ""), done.stderr
        first, second = done.stderr.splitlines()
        assert first.startswith("ocs[0].driver: must be one of ")
        assert second.startswith("ocs[1].options.colour: is not known (known: boot,")
