"""Conventions of all commands: an example in the help, and --json if the command prints results."""

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.commands import MODULE_OF
from orchestrrl.cli.main import application, load

# Services run until stopped; they print only their address and their log.
SERVICES = {"up", "daemon", "agent", "gateway", "engine simulated", "ocs serve", "ocs emulate", "sync peer"}


LEAVES = {tuple(path.split()): load(path) for path in MODULE_OF}


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_shows_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(application(), [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"orchestrrl {' '.join(path)}" in " ".join(result.stdout.split()).partition("Example")[2]


@pytest.mark.parametrize("path", [path for path in LEAVES if " ".join(path) not in SERVICES], ids=" ".join)
def test_every_command_with_results_has_json_flag(path: tuple[str, ...]) -> None:
    flags = {name for parameter in LEAVES[path].params for name in parameter.opts}
    assert "--json" in flags
