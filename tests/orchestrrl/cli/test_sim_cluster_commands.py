"""`orchestrrl sim run`, `compare`, `split`, `sweep`, `report`, `daemon-config`: output, files and errors."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from tests.orchestrrl.lab.sim.rl.cluster_builders import document


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(document(fabrics=["fat_tree", "oversubscribed"])))
    return tmp_path


def called(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(application(), ["sim", *arguments])
    assert result.exit_code == status, result.output
    return result


def test_run_prints_a_row_for_each_fabric_and_arm() -> None:
    shown = called("run", "small.yaml").stdout
    assert "fat_tree" in shown
    assert "oversubscribed" in shown
    assert "samples/s" in shown


def test_run_as_json_is_one_object_and_deterministic() -> None:
    shown = called("run", "small.yaml", "--fabrics", "oversubscribed", "--seeds", "3,4", "--json").stdout
    value = json.loads(shown)
    assert [row["fabric"] for row in value["summary"]] == ["oversubscribed"]
    assert [each["run"]["seed"] for each in value["results"]] == [3, 4]
    assert value["scenario"]["seeds"] == [3, 4]
    assert called("run", "small.yaml", "--fabrics", "oversubscribed", "--seeds", "3,4", "--json").stdout == shown


def test_compare_is_relative_to_the_first_named() -> None:
    shown = called("compare", "small.yaml", "--fabrics", "oversubscribed,fat_tree").stdout
    assert shown.index("oversubscribed") < shown.index("fat_tree")
    assert "1.00x" in shown


def test_split_shows_all_splits_and_the_best() -> None:
    shown = called("split", "small.yaml").stdout
    assert "gen/train" in shown
    assert "cluster: {train_gpus: " in shown
    value = json.loads(called("split", "small.yaml", "--fabric", "oversubscribed", "--json").stdout)
    assert value["best"] in value["tried"]
    faults = called("split", "small.yaml", "--fabric", "torus", "--arm", "magic", status=2).stderr.splitlines()
    assert [fault.split(":")[0] for fault in faults] == ["--fabric", "--arm"]


def test_report_writes_a_page(in_folder: Path) -> None:
    assert "sim report out" in called("run", "small.yaml", "--out", "out").stdout
    assert called("report", "out", "-o", "new/page.html").stdout == "wrote new/page.html\n"
    assert json.loads(called("report", "out", "-o", "page.html", "--json").stdout) == {
        "wrote": "page.html",
        "results": 2,
    }
    assert "<svg" in (in_folder / "new" / "page.html").read_text()
    assert "nothing: No such file" in called("report", "nothing", status=2).stderr


def test_all_errors_are_reported_at_once(in_folder: Path) -> None:
    (in_folder / "file").write_text("")
    flags = ("--fabrics", "torus", "--arms", "magic", "--seeds", "x", "--out", "file")
    faults = called("run", "small.yaml", *flags, status=2).stderr.splitlines()
    assert [fault.split(":")[0] for fault in faults] == ["--fabrics[0]", "--arms[0]", "--seeds[0]", "--out"]
    (in_folder / "bad.yaml").write_text(yaml.safe_dump(document(model="gpt-9", loop__steps=0)))
    faults = called("run", "bad.yaml", status=2).stderr.splitlines()
    assert [fault.split(":")[0] for fault in faults] == ["model", "loop.steps"]


def test_loop_that_cannot_continue_is_reported_without_traceback(in_folder: Path) -> None:
    (in_folder / "full.yaml").write_text(yaml.safe_dump(document(loop__buffer_samples=3)))
    assert "no room in a buffer of 3 samples" in called("run", "full.yaml", status=1).stderr


def test_daemon_config_is_a_valid_configuration(in_folder: Path) -> None:
    assert called("daemon-config", "small.yaml", "-o", "d.yaml").stdout == "wrote d.yaml\nwrote d.profile.yaml\n"
    assert json.loads(called("daemon-config", "small.yaml", "-o", "d.yaml", "--json").stdout)["wrote"][0] == "d.yaml"
    checked = CliRunner().invoke(application(), ["check-config", "d.yaml"])
    assert checked.exit_code == 0, checked.output
    assert "no errors" in checked.stdout
    assert "--fabric: must be one of" in called("daemon-config", "small.yaml", "--fabric", "x", status=2).stderr
