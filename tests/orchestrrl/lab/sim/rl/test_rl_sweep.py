"""Tests of sweeps: points of a grid, kept results, and runners."""

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable
from orchestrrl.lab.sim.rl import sweep as sweeps
from orchestrrl.lab.sim.rl.results import read
from orchestrrl.lab.sim.rl.sweep import PointResults, SweepPoint, load_sweep, on_ray, put, run_point, sweep
from tests.orchestrrl.lab.sim.rl.cluster_builders import document

GRID = {"cluster.nic_gbps": [100, 200], "training.tp": [2, 3, 4]}


def written(folder: Path, grid: object = GRID, **more: object) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(document()))
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": "base.yaml", "grid": grid, **more}))
    return path


def quiet(what: str, done: int, total: int) -> None:
    """Ignore progress."""


class Here:
    """A runner that runs points in this process, and may be interrupted after `cut_after` points."""

    def __init__(self, cut_after: int | None = None) -> None:
        self.ran: list[str] = []
        self.cut_after = cut_after

    def __call__(self, points: Sequence[SweepPoint]) -> Iterator[tuple[SweepPoint, PointResults]]:
        for point in points:
            if len(self.ran) == self.cut_after:
                raise KeyboardInterrupt
            self.ran.append(point.title)
            yield point, run_point(point)


def test_grid_is_every_combination_in_order(tmp_path: Path) -> None:
    points = load_sweep(written(tmp_path, set={"training.ep": 1}))
    assert [point.title for point in points][:3] == [
        "cluster.nic_gbps=100, training.tp=2",
        "cluster.nic_gbps=100, training.tp=3",
        "cluster.nic_gbps=100, training.tp=4",
    ]
    assert [bool(point.fault) for point in points] == [False, True, False] * 2
    assert points[0].document is not None
    assert points[0].document["cluster"]["nic_gbps"] == 100


def test_invalid_sweeps_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ProblemFaults, match=r"cluster.nic_gps: is not a known field, got 100"):
        load_sweep(written(tmp_path, {"cluster.nic_gps": [100]}))
    with pytest.raises(ProblemFaults, match=r"grid.a b: must be a path"):
        load_sweep(written(tmp_path, {"a b": [100]}))
    with pytest.raises(ProblemFaults, match=r"has no element 3 in"):
        load_sweep(written(tmp_path, {"fabrics[3].kind": ["fat_tree"]}))
    with pytest.raises(ProblemFaults, match=r"grid: must have at most 100000 points"):
        load_sweep(written(tmp_path, {"seeds": [[1]] * 1000, "cluster.nic_gbps": [100] * 101}))
    (tmp_path / "sweep.yaml").write_text("base: nothing.yaml\ngrid: {seeds: [[1]]}\n")
    with pytest.raises(ProblemFaults, match=r"base: .*nothing.yaml"):
        load_sweep(tmp_path / "sweep.yaml")
    (tmp_path / "sweep.yaml").write_text("grid: 3\nmore: 1\n")
    with pytest.raises(ProblemFaults) as caught:
        load_sweep(tmp_path / "sweep.yaml")
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["base", "grid", "more"]


def test_put_follows_lists_and_creates_sections() -> None:
    place = document()
    put(place, "fabrics[0]", {"kind": "oversubscribed"})
    put(place, "fabrics[0].options.ratio", 2)
    put(place, "weight_sync.holds", "both")
    assert place["fabrics"] == [{"kind": "oversubscribed", "options": {"ratio": 2}}]
    assert place["weight_sync"] == {"holds": "both"}
    with pytest.raises(ValueError, match=r"name.first: has no element 'first' in 'small'"):
        put(place, "name.first", 1)


@pytest.mark.parametrize("cut_after", range(4))
def test_interrupted_sweep_resumes(tmp_path: Path, cut_after: int) -> None:
    points, out = load_sweep(written(tmp_path)), tmp_path / "out"
    cut = Here(cut_after)
    with pytest.raises(KeyboardInterrupt):
        sweep(points, out, cut, quiet)
    (out / "0.part").write_text("half a file") if out.exists() else None
    rest = Here()
    swept = sweep(points, out, rest, quiet)
    assert cut.ran + rest.ran == [point.title for point in points if not point.fault]
    assert (swept.found, len(swept.done), len(swept.failed)) == (cut_after, 4, 2)
    assert len(read(out)) == 4
    before = {path.name: path.read_bytes() for path in out.glob("*.json")}
    assert sweep(points, out, Here(0), quiet).found == 4  # no point is left to run
    sweep(points, out, Here(), quiet, again=True)
    assert {path.name: path.read_bytes() for path in out.glob("*.json")} == before


def test_failed_point_is_reported_and_others_run(tmp_path: Path) -> None:
    grid = {"faults": [[], [{"at_s": 0, "fail": "server", "of": [2, 3]}]]}
    swept = sweep(load_sweep(written(tmp_path, grid)), tmp_path / "out", Here(), quiet)
    assert len(swept.done) == 1
    assert "never ends" in swept.failed[0].fault


def test_missing_ray_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = load_sweep(written(tmp_path, {"training.tp": [2]}))
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Retryable, match=f"no Ray cluster at {address}"):
            next(on_ray(points, address))
    with pytest.raises(ProblemFaults, match=r"--ray: .*, got 'here'"):
        next(on_ray(points, "here"))
    monkeypatch.setattr(sweeps, "find_spec", lambda name: None)
    with pytest.raises(Permanent, match=r"orchestrrl\[ray\]"):
        next(on_ray(points, "auto"))
