"""`orchestrrl plan render` and the settings that it reads, as a process sees them."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.orchestrrl.cli.test_plan_render_command import SIMULATED, fleet, run


@pytest.mark.parametrize("configuration", ["wide", "tp2"])
def test_a_rendered_simulated_engine_starts(tmp_path: Path, configuration: str) -> None:
    """All but the last: it is told to end with an error, which comes after its options were read."""
    rendered = run(tmp_path, fleet(SIMULATED), "--configuration", configuration, "--json")
    argv = json.loads(rendered.stdout)["engines"][0]["processes"][0]["argv"]
    done = subprocess.run([*argv, "--fail-start"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "failed to start as requested" in done.stderr) == (1, True), done.stderr
