"""Plans of weight syncs are the same in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_same_problem_has_the_same_plan_in_any_process(hash_seed: str) -> None:
    shown = "from sync_sites import *; from planner.sync_tree.plan import make_plan; import hashlib, json\n"
    shown += "p = problem_of(regular(1, 3, 8, tp=2))\n"
    shown += "print(hashlib.sha256(json.dumps(answer_of(p, make_plan(p))).encode()).hexdigest())"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "tests" / "planner" / "sync_tree"), str(root)])
    found = [
        subprocess.run(
            [sys.executable, "-c", shown],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", hash_seed)
    ]
    assert found[0] == found[1]
