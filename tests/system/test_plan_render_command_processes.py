"""`orchestrrl plan render` as a process."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.orchestrrl.cli.test_plan_render_command import SIMULATED, fleet, run


@pytest.mark.parametrize("configuration", ["wide", "tp2"])
def test_rendered_simulated_engine_starts(tmp_path: Path, configuration: str) -> None:
    """The last engine is started with --fail-start, whose error appears after its options were read."""
    rendered = run(tmp_path, fleet(SIMULATED), "--configuration", configuration, "--json")
    argv = json.loads(rendered.stdout)["engines"][0]["processes"][0]["argv"]
    done = subprocess.run([*argv, "--fail-start"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "failed to start as requested" in done.stderr) == (1, True), done.stderr
