"""A sweep on a real Ray cluster on this machine writes the same files as local processes."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.orchestrrl.lab.sim.rl.cluster_builders import document
from tests.system.ray_cluster import ray_nodes

ROOT = Path(__file__).parents[2]
WITHIN_S = 240.0


def swept(folder: Path, out: str, *flags: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "orchestrrl", "sim", "sweep", "sweep.yaml", "--out", out, *flags]
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=merged, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 1, done.stdout + done.stderr  # one point must fail
    return done.stderr


def test_sweep_on_ray_writes_the_same_files_as_processes(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(document()))
    faults = [[], [{"at_s": 0, "fail": "server", "of": [2, 3]}], [{"at_s": 0, "fail": "server", "of": 3}]]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "grid": {"faults": faults}}))
    assert "never ends" in swept(tmp_path, "here")
    with ray_nodes() as nodes:
        nodes.start_head("{}")
        environment = {**nodes.environment, "PYTHONPATH": str(ROOT)}
        assert "never ends" in swept(tmp_path, "there", "--ray", nodes.address, environment=environment)
    files = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    assert len(files) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == files
