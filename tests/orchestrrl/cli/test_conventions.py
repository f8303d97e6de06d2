"""What holds for every command: an example in its help, --json where it prints results, completion."""

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.commands import COMMANDS
from orchestrrl.cli.main import application, load

# Services run until stopped; their output is their address and their log.
SERVICES = {"daemon", "agent", "gateway", "engine simulated", "ocs serve", "ocs emulate", "sync peer"}


LEAVES = {tuple(path.split()): load(path) for path in COMMANDS}


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_shows_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(application(), [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"orchestrrl {' '.join(path)}" in " ".join(result.stdout.split()).partition("Example")[2]


@pytest.mark.parametrize("path", [path for path in LEAVES if " ".join(path) not in SERVICES], ids=" ".join)
def test_results_come_as_json_too(path: tuple[str, ...]) -> None:
    flags = {name for parameter in LEAVES[path].params for name in parameter.opts}
    assert "--json" in flags


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(shell: str) -> None:
    result = CliRunner().invoke(
        application(), [], env={"_ORCHESTRRL_COMPLETE": f"source_{shell}"}, prog_name="orchestrrl"
    )
    assert "orchestrrl" in result.stdout
    typed = {
        "COMP_WORDS": "orchestrrl plan ex",
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": "orchestrrl plan ex",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    offered = CliRunner().invoke(
        application(), [], env={"_ORCHESTRRL_COMPLETE": f"complete_{shell}", **typed}, prog_name="orchestrrl"
    )
    assert "explain" in offered.stdout
