"""Tests of the commands `orchestrrl sim run`, `compare`, `sweep`, `split`, `report` and `daemon-config`."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner
from typer.testing import Result as Ran

from orchestrrl.cli.main import application
from orchestrrl.cli.sim.cluster import digits, notes_of
from orchestrrl.core.errors import Permanent
from orchestrrl.lab.sim.rl.results import ClusterResult, read
from orchestrrl.lab.sim.rl.run import run_arm
from orchestrrl.lab.sim.rl.scenario import load_cluster_scenario
from orchestrrl.lab.sim.rl.stages import FabricStages
from tests.orchestrrl.lab.sim.report.results_builder import result
from tests.orchestrrl.lab.sim.rl.cluster_builders import TEXT, document


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    return path


def sim(*arguments: object) -> Ran:
    return CliRunner().invoke(application(), ["sim", *map(str, arguments)])


def faults_of(*arguments: object) -> list[str]:
    """Run a command that must exit with status 2, and return its faults."""
    ran = sim(*arguments)
    assert ran.exit_code == 2, ran.output
    assert isinstance(ran.exception, SystemExit)
    assert ran.stdout == ""
    return ran.stderr.splitlines()


def test_faults_of_options_and_scenario_are_reported_together(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump(document(loop__steps=0, gpu="h8oo")))
    (tmp_path / "file").write_text("")
    faults = faults_of("run", bad, "--arms", "bath", "--seeds", "1,x", "--out", tmp_path / "file" / "results")
    assert [fault.partition(":")[0] for fault in faults] == ["gpu", "loop.steps", "--arms[0]", "--seeds[1]", "--out"]
    assert faults[-1] == f"--out: must be a folder, got the file '{tmp_path / 'file'}'"
    assert [fault.partition(":")[0] for fault in faults_of("split", bad, "--arm", "bath")][-1] == "--arm"


def test_invalid_commands_create_no_files(tmp_path: Path, scenario: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("base: small.yaml\ngrid: {training.tp: [3]}\n")
    faults_of("sweep", sweep, "--out", tmp_path / "new")
    faults_of("run", scenario, "--arms", "bath", "--out", tmp_path / "new" / "deep")
    assert faults_of("daemon-config", scenario, "-o", tmp_path) == [
        f"--out: must be a file, got the folder '{tmp_path}'"
    ]
    assert not (tmp_path / "new").exists()


def test_unwritable_folder_is_reported_before_the_run(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orchestrrl.cli.sim.generation.TemporaryFile", full)
    monkeypatch.setattr("orchestrrl.lab.sim.rl.run.run_cluster", None)
    (fault,) = faults_of("run", scenario, "--out", scenario.parent)
    assert fault == f"--out: cannot write to '{scenario.parent}': No space left on device"


def test_failed_run_keeps_earlier_results(tmp_path: Path, scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(stages: FabricStages, arm: str, seed: int) -> ClusterResult:
        if seed == 2:
            raise Permanent("fat tree, verl_to: never ends")
        return run_arm(stages, arm, seed)

    monkeypatch.setattr("orchestrrl.lab.sim.rl.run.run_arm", first_alone)
    ran = sim("run", scenario, "--seeds", "1,2", "--out", tmp_path / "out")
    assert ran.exit_code == 1
    assert "never ends; the results of 1 earlier runs are stored in" in " ".join(ran.stderr.split())
    assert [each.run.seed for each in read(tmp_path / "out")] == [1]


def test_comparison_results_make_a_page_with_its_command(tmp_path: Path, scenario: Path) -> None:
    out, page = tmp_path / "out" / "small", tmp_path / "pages" / "it's.html"
    ran = sim("compare", scenario, "--arms", ",", "--out", out)  # no name: the scenario's arms
    assert ran.exit_code == 0, ran.output
    assert [each.run.arm for each in read(out)] == ["verl_to"]
    assert "fat_tree, verl_to: weight sync to" in ran.output
    assert sim("report", out, "-o", page).exit_code == 0
    assert "<code>orchestrrl sim report " in page.read_text()
    (kept,) = out.iterdir()
    assert kept.stat().st_mode & 0o777 == page.stat().st_mode & 0o777
    (fault,) = faults_of("report", out, "-o", tmp_path)
    assert fault == f"{tmp_path}: cannot be written: Is a directory"


def test_split_results_make_a_page(tmp_path: Path, scenario: Path) -> None:
    out, page = tmp_path / "splits", tmp_path / "page.html"
    ran = sim("split", scenario, "--out", out, "--json")
    assert ran.exit_code == 0, ran.output
    tried = [each["train_gpus"] for each in json.loads(ran.stdout)["tried"]]
    assert sim("report", out, "-o", page).exit_code == 0
    for gpus in tried:
        assert f">train_gpus {gpus}, gen_gpus {32 - gpus} · fat_tree · verl_to<" in page.read_text()


def test_printed_example_is_a_valid_scenario(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(sim("run", "--print-example").stdout)
    assert load_cluster_scenario(str(mine)) == load_cluster_scenario("cluster64")
    assert sim("run", "cluster512", "--print-example").stdout.startswith("# 512 GPUs")
    assert "cluster64, got 'none'" in faults_of("run", "none", "--print-example")[0]


def test_names_are_escaped(tmp_path: Path) -> None:
    named, out = tmp_path / "named.yaml", tmp_path / "out[/u]"
    fabric = {"kind": "fat_tree", "name": "x[/y]"}
    named.write_text(yaml.safe_dump(document(name="m[/z]", fabrics=[fabric])))
    for command in (("compare",), ("run",), ("split",)):
        ran = sim(*command, named, "--out", out)
        assert ran.exit_code == 0, ran.output
        assert "m[/z]" in ran.output
        assert f"wrote results to {out};" in ran.output
    assert f"wrote {out}.html" in sim("report", out, "-o", f"{out}.html").output


def test_unknown_prices_leave_no_frontier(tmp_path: Path) -> None:
    odd = tmp_path / "odd.yaml"
    odd.write_text(yaml.safe_dump(document(cluster__nic_gbps=123)))
    ran = sim("compare", odd)
    assert ran.exit_code == 0, ran.output
    assert "there are no prices for 123 Gbps" in ran.output
    assert "*" not in ran.output


def test_notes_that_differ_only_in_fabric_are_merged() -> None:
    several = [result(fabric=fabric) for fabric in ("one", "two", "three")]
    lines = notes_of(several, None)[1:]
    assert lines == ["one, both: weight sync to 4 x tp8 (and 2 more)"]
    assert notes_of(several[:1], None)[1:] == ["one, both: weight sync to 4 x tp8"]


@pytest.mark.parametrize(("value", "shown"), [(10.0, "10.0"), (1543.2, "1,543"), (0.01234, "0.0123"), (99.96, "100.")])
def test_digits_shows_three_digits(value: float, shown: str) -> None:
    assert digits(value) == shown.rstrip(".")
