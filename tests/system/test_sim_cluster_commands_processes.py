"""`orchestrrl sim sweep` with failing points and existing results."""

import json
from pathlib import Path

import pytest
import yaml

from tests.orchestrrl.cli.test_sim_cluster_commands import called
from tests.orchestrrl.lab.sim.rl.cluster_builders import document


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(document(fabrics=["fat_tree", "oversubscribed"])))
    return tmp_path


def test_sweep_reports_failures_and_reuses_results(in_folder: Path) -> None:
    sweep = {"base": "small.yaml", "set": {"fabrics": ["fat_tree"]}, "grid": {"training.tp": [3, 4]}}
    (in_folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    first = called("sweep", "sweep.yaml", "--out", "out", "--processes", "1", status=1)
    assert "1 of 2 points" in first.stdout
    assert "failed: training.tp=3: training: tp * cp * pp must divide" in first.stderr
    again = json.loads(called("sweep", "sweep.yaml", "--out", "out", "--json", status=1).stdout)
    assert [point["values"] for point in again["points"]] == [{"training.tp": 4}]
    assert (
        "--processes: cannot be combined with --ray"
        in called("sweep", "sweep.yaml", "--ray", "auto", "--processes", "1", status=2).stderr
    )
