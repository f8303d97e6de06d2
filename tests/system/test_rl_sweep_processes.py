"""Sweeps in parallel processes."""

from pathlib import Path

from orchestrrl.lab.sim.rl.results import read
from orchestrrl.lab.sim.rl.run import run_cluster
from orchestrrl.lab.sim.rl.scenario import scenario_of
from orchestrrl.lab.sim.rl.sweep import in_processes, load_sweep, sweep
from tests.orchestrrl.lab.sim.rl.test_rl_sweep import written


def test_parallel_results_equal_serial_results(tmp_path: Path) -> None:
    points = [point for point in load_sweep(written(tmp_path)) if not point.fault][:2]
    there = tmp_path / "there"
    assert sweep(points, there, lambda todo: in_processes(todo, 2), lambda *_: None).failed == ()
    for point in points:
        assert point.document is not None
        results = run_cluster(scenario_of(dict(point.document)))
        assert read(there / f"{point.digest}.json") == tuple(results)
