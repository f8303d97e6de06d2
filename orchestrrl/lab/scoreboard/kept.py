"""Figures' rows in a folder, so that an interrupted run goes on: a file each, good as long as code and question are the
same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import balancer
import orchestrrl
import planner
from orchestrrl.lab.scoreboard.model import ScoreboardRow


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
