"""Tests of result files: round trip, atomic writes, and faults with the file's name."""

import json
from pathlib import Path

import pytest

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.rl.model import RlRun, TimelineSpan
from orchestrrl.lab.sim.rl.results import Bill, ClusterResult, as_text, complete, digest_of, read, write
from orchestrrl.lab.sim.train.model import OverlapWindow

SCENARIO = {"name": "one", "fabrics": ["rfabric"], "generation": {"arms": ["both"]}, "seeds": [1], "loop": {"steps": 2}}


def result(samples_per_s: float = 2.0) -> ClusterResult:
    run = RlRun(
        fabric="rfabric",
        arm="both",
        seed=1,
        seconds=10.0,
        samples=20,
        samples_per_s=samples_per_s,
        spans=(
            TimelineSpan("gen", FabricStage.GEN, 0, 0.0, 4.0),
            TimelineSpan("train", FabricStage.TRAIN, 0, 4.0, 6.0, "batch 0"),
        ),
        steps=({"gen_s": 4.0, "train_s": 2.0},),
        staleness={0: 10, 1: 10},
        idle_share={FabricStage.TRAIN: 0.25, FabricStage.GEN: 0.0},
        tier_bytes={"train": {"nic": 1e9}},
        windows=(OverlapWindow(0.0, 0.1, "dp", "ep"),),
        remaining=((0.0, 8), (3.0, 0)),
        notes=("short",),
    )
    return ClusterResult(run, Bill(4e6, {"nics": 4e6}), {"compute": 1.0}, 0.4, scenario=SCENARIO)


def test_written_results_are_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "new", SCENARIO, [result(), result(3.0)])
    assert path.name == f"{digest_of(SCENARIO)}.json"
    assert read(path) == (result(), result(3.0)) == read(tmp_path / "new")
    assert path.read_text() == as_text(SCENARIO, [result(), result(3.0)])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_digest_does_not_depend_on_field_order() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"a": 1, "b": 2}) != digest_of({"a": 2, "b": 2})


def test_truncated_file_is_not_complete(tmp_path: Path) -> None:
    path = write(tmp_path, SCENARIO, [result()])
    digest = digest_of(SCENARIO)
    assert complete(tmp_path, [digest, "other"]) == {digest}
    path.write_text(path.read_text()[:100])
    assert complete(tmp_path, [digest]) == set()


def test_file_without_all_runs_is_not_complete(tmp_path: Path) -> None:
    """`sim run` and `compare` write the file after each run."""
    two = {**SCENARIO, "seeds": [1, 2]}
    write(tmp_path, two, [result()])
    assert complete(tmp_path, [digest_of(two)]) == set()
    write(tmp_path, two, [result(), result(3.0)])
    assert complete(tmp_path, [digest_of(two)]) == {digest_of(two)}


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write(tmp_path, SCENARIO, [result(float("nan"))])
    assert list(tmp_path.iterdir()) == []


def test_faults_name_their_file(tmp_path: Path) -> None:
    path = write(tmp_path, SCENARIO, [result()])
    document = json.loads(path.read_text())
    document["results"][0]["run"] |= {"seconds": "long", "samples_per_s": float("nan")}
    path.write_text(json.dumps(document))
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ProblemFaults) as caught:
        read(tmp_path)
    paths = [fault.split(": ")[1] for fault in caught.value.faults]
    assert paths == ["results[0].run.seconds", "results[0].run.samples_per_s", "(document)"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ProblemFaults, match="contains no results"):
        read(empty)


def test_throughput_per_dollar_uses_network_cost() -> None:
    assert result().samples_per_s_per_musd == pytest.approx(0.5)
