"""Figures' rows in a folder, so that an interrupted run goes on: a file each, good as long as code and question are the
same."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from typing import Any

import balancer
import orchestrrl
import planner
from orchestrrl.lab.scoreboard.model import PaperClaim, ScoreboardRow


@dataclass(frozen=True, slots=True)
class Made:
    """A figure's rows, and what they took on the machine that made them."""

    id: str
    title: str
    quick: str  # what there is less of; empty: nothing
    rows: tuple[ScoreboardRow, ...]
    seconds: float


def code_digest() -> str:
    """Of all that decides about a figure."""
    digest = sha256()
    for package in (orchestrrl, planner, balancer):
        assert package.__file__ is not None
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def path_of(folder: Path, id: str, quick: bool) -> Path:
    return folder / f"{id}{'.quick' if quick else ''}.json"


def write(folder: Path, made: Made, quick: bool, code: str) -> None:
    """Whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, made.id, quick)
    partly = path.with_suffix(".part")
    partly.write_text(json.dumps({"code": code, **as_json(made)}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partly.replace(path)


def read(folder: Path, id: str, quick: bool, code: str) -> Made | None:
    """None where there is none, or none of this code."""
    try:
        document = json.loads(path_of(folder, id, quick).read_text(encoding="utf-8"))
        return made_of(document) if document["code"] == code else None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError):
        return None


def as_json(made: Made) -> dict[str, Any]:
    return {
        "id": made.id,
        "title": made.title,
        "quick": made.quick,
        "seconds": made.seconds,
        "rows": [row_as_json(row) for row in made.rows],
    }


def row_as_json(row: ScoreboardRow) -> dict[str, Any]:
    """Of a bound the open side is null."""
    paper = None
    if row.paper is not None:
        low, high = (each if isfinite(each) else None for each in (row.paper.low, row.paper.high))
        paper = {"low": low, "high": high, "at_most": row.paper.at_most}
    difference = row.difference
    return {**asdict(row), "paper": paper, "difference": difference if difference is not None else None}


def made_of(document: dict[str, Any]) -> Made:
    rows = tuple(_row(each) for each in document["rows"])
    return Made(document["id"], document["title"], document["quick"], rows, document["seconds"])


def _row(document: dict[str, Any]) -> ScoreboardRow:
    fields = {name: value for name, value in document.items() if name != "difference"}
    if (paper := fields["paper"]) is not None:
        low = -inf if paper["low"] is None else paper["low"]
        high = inf if paper["high"] is None else paper["high"]
        fields["paper"] = PaperClaim(low, high, paper["at_most"])
    return ScoreboardRow(**fields)


def all_rows(made: Sequence[Made]) -> list[ScoreboardRow]:
    return [row for each in made for row in each.rows]
