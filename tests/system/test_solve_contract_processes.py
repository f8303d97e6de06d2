"""`orchestrrl plan solve` gives identical output in every process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from tests.planner.solver.test_solve_contract import fleet_of


def test_same_input_gives_identical_output_in_any_process(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(fleet_of(Random(7))))
    output = set()
    for seed in ("0", "1"):  # string hashes differ, and therefore the order of sets
        shown = subprocess.run(
            [sys.executable, "-m", "orchestrrl", "plan", "solve", str(path), "--json"],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert shown.stderr == ""
        output.add("\n".join(line for line in shown.stdout.splitlines() if '"solve_s"' not in line))
    assert len(output) == 1
