"""Shell completion of the command line."""

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
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
