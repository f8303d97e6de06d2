"""Cluster simulations in separate processes: Ctrl-C in a sweep, and independence of hash order."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrrl.lab.sim.rl.results import read
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

WITHIN_S = 120.0
SIM = [sys.executable, "-m", "orchestrrl", "sim"]


@pytest.mark.parametrize(("ended_by", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_interrupted_sweep_leaves_complete_results_and_no_process(tmp_path: Path, ended_by: int, status: int) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(document()))
    # The second point would take hours.
    grid = {"loop.steps": [2, 100_000]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "grid": grid}))
    command = [*SIM, "sweep", "sweep.yaml", "--out", "out", "--processes", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + WITHIN_S
        while not list((tmp_path / "out").glob("*.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        if ended_by == signal.SIGINT:  # Ctrl-C in a terminal is sent to the whole process group
            os.killpg(process.pid, ended_by)
        else:
            process.kill()
        _, output = process.communicate(timeout=WITHIN_S)
        assert process.returncode == status
        if ended_by == signal.SIGINT:  # a process killed while it starts a worker prints an error
            assert "Traceback" not in output
        _, alive = psutil.wait_procs(children, timeout=WITHIN_S)
        assert not alive
        assert len(read(tmp_path / "out")) == 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_results_are_independent_of_hash_order(tmp_path: Path) -> None:
    changed = document(
        fabrics=["rfabric"], generation__arms=["both"], faults=[{"at_s": 1, "fail": "nic", "of": [1, 9]}]
    )
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(changed))

    def shown(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [*SIM, "run", "small.yaml", "--json"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=WITHIN_S
        ).stdout

    assert shown("1") == shown("2")
