"""`planner.solver.makespan.solve` and `orchestrrl plan solve` against the contract: every figure of an answer
recomputed from the problem, its bound and its makespan held against everything that small fleets can do, and against
static fleets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from tests.planner.solver.test_solve_contract import fleet_of


def test_the_same_input_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(fleet_of(Random(7))))
    told = set()
    for seed in ("0", "1"):  # hashes of strings differ, and with them the order of sets
        shown = subprocess.run(
            [sys.executable, "-m", "orchestrrl", "plan", "solve", str(path), "--json"],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert shown.stderr == ""
        told.add("\n".join(line for line in shown.stdout.splitlines() if '"solve_s"' not in line))
    assert len(told) == 1
