"""Make figures, side by side in processes of this machine, and keep their rows in a folder, so that an interrupted run
goes on: a file each, valid as long as code and question are the same."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import balancer
import orchestrrl
import planner
from orchestrrl.core.errors import Permanent
from orchestrrl.lab.processes import run_tasks
from orchestrrl.lab.scoreboard.claims import ScoreboardPart, ScoreboardRow
from orchestrrl.lab.scoreboard.figures import FIGURES


@dataclass(frozen=True, slots=True)
class Made:
    """A figure's rows, and what they took on the machine that made them."""

    id: str
    title: str
    quick: str  # what there is less of; empty: nothing
    rows: tuple[ScoreboardRow, ...]
    seconds: float


_MADE = TypeAdapter(Made)


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
        return _MADE.validate_python(document) if document["code"] == code else None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError):
        return None


def as_json(made: Made) -> dict[str, Any]:
    """Of a bound the open side is null."""
    document: dict[str, Any] = json.loads(_MADE.dump_json(made))
    for fields, row in zip(document["rows"], made.rows, strict=True):
        fields["difference"] = row.difference
    return document


def all_rows(made: Sequence[Made]) -> list[ScoreboardRow]:
    return [row for each in made for row in each.rows]


Report = Callable[[str, int, int], None]  # what is under way, done, in all
# Of those that take minutes, the longest first; others behind them.
LONGEST_FIRST = ("17", "13-moe", "9", "16", "additions", "10", "18", "13-dense", "14")


def make(
    figures: Sequence[ScoreboardPart], quick: bool, folder: Path, report: Report, *, processes: int | None = None
) -> list[Made]:
    """In the order given. Raises Permanent where one cannot be made; those that were made are kept."""
    code = code_digest()
    found = {figure.id: made for figure in figures if (made := read(folder, figure.id, quick, code)) is not None}
    waiting = sorted((figure.id for figure in figures if figure.id not in found), key=_rank)
    report("kept from before", len(found), len(figures))
    for id, result in run_tasks(partial(_make, quick=quick), waiting, processes):
        if isinstance(result, ChildProcessError):
            raise Permanent(f"figure {id}: {result}; run it again, with less memory in use")
        if isinstance(result, Exception):
            raise result
        write(folder, result, quick, code)
        found[id] = result
        report(f"figure {id} done", len(found), len(figures))
    return [found[figure.id] for figure in figures]


def _rank(id: str) -> int:
    return LONGEST_FIRST.index(id) if id in LONGEST_FIRST else len(LONGEST_FIRST)


def _make(id: str, quick: bool) -> Made:
    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    figure, started_s = next(each for each in FIGURES if each.id == id), time.perf_counter()
    rows = tuple(figure.make(quick))
    return Made(id, figure.title, figure.quick if quick else "", rows, time.perf_counter() - started_s)
