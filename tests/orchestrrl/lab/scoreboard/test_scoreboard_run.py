"""Tests of making and keeping figures, of the page, and of the command's output."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.scoreboard import page
from orchestrrl.lab.scoreboard.claims import PaperClaim, ScoreboardRow
from orchestrrl.lab.scoreboard.fabrics import costs
from orchestrrl.lab.scoreboard.run import FIGURES, Made, chosen, make, path_of, read, write

SCOREBOARD = Path(__file__).parents[4] / "docs" / "scoreboard.md"
ROWS = (
    ScoreboardRow("Figure 15", "cost | of it", PaperClaim.of(0.5), 0.75, why="a reason", claim="fabric.cost.topoopt"),
    ScoreboardRow("Figure 5", "idle", PaperClaim(1.0, float("inf")), 200.0, "s"),
    ScoreboardRow("Figure 20", "solving", PaperClaim.bound(11.0), 0.00002, "s"),
    ScoreboardRow("Beyond", "more", None, -0.125, "share"),
)


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


def test_kept_rows_are_read_back(tmp_path: Path) -> None:
    made = Made("15", "Figure 15", "less", ROWS, 1.5)
    write(tmp_path, made, True, "code")
    assert read(tmp_path, "15", True, "code") == made
    assert read(tmp_path, "15", False, "code") is None, "a quick figure is not a full one"
    assert read(tmp_path, "15", True, "other code") is None
    path_of(tmp_path, "15", True).write_text("{")
    assert read(tmp_path, "15", True, "code") is None


def test_kept_figures_are_not_made_again(tmp_path: Path) -> None:
    figures = chosen(["20", "11"])
    first = make(figures, True, tmp_path, quiet, processes=2)
    assert [each.id for each in first] == [figure.id for figure in figures]
    assert make(figures, True, tmp_path, quiet) == first, "including the seconds"
    path_of(tmp_path, "11", True).unlink()  # as after an interruption
    again = {each.id: each for each in make(figures, True, tmp_path, quiet)}
    assert again["20"] in first
    assert again["11"].rows == next(each.rows for each in first if each.id == "11")


def test_unknown_figures_are_reported_together() -> None:
    with pytest.raises(ProblemFaults) as caught:
        chosen(["13", "99", "nine"])
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["--figures[1]", "--figures[2]"]
    result = CliRunner().invoke(application(), ["sim", "paper", "--figures", "99,nine"])
    assert result.exit_code == 2
    assert "must be one of 2, 2-phases" in result.output
    assert "'nine'" in result.output


def test_command_prints_only_json(tmp_path: Path) -> None:
    arguments = ["sim", "paper", "--quick", "--json", "--figures", "11", "--out", str(tmp_path)]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [each["id"] for each in document["figures"]] == ["11"]
    assert {"figure", "what", "paper", "ours", "difference", "why"} <= document["figures"][0]["rows"][0].keys()


def test_page_has_every_row_and_constant() -> None:
    text = page.page([Made("15", "Figure 15: cost", "less of it", ROWS, 1.5)])
    assert "| cost \\| of it | 0.50 | 0.75 | +50% | a reason |" in text
    assert "| idle | at least 1 s | 200 s | +0% |  |" in text
    assert "| solving | at most 11 s | 20 us | +0% |  |" in text
    assert "| more |  | -12.5% |  |  |" in text
    assert "3 rows have a figure in the paper; 2 of them are within 15%, 1 deviate by more." in text
    assert "Reduced run: less of it." in text
    assert "maximum length at scale" in text


def test_committed_page_is_current() -> None:
    """`orchestrrl sim paper --write-docs docs/scoreboard.md` writes the page."""
    text = SCOREBOARD.read_text()
    assert f"claims and constants: {page.digest()} -->" in text, f"write it again: {page.COMMAND}"
    for figure in FIGURES:
        assert f"\n## {figure.title}\n" in text
    rows = list(costs(True))
    assert page.table(rows) in text
