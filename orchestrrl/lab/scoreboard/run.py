"""Make the figures of the scoreboard, and list the paper's figures that cannot be reproduced.

Figures are made in parallel by local processes. The rows of each figure are stored in a file, so that an interrupted
run can continue. A file remains valid until the code changes. Quick runs use separate files.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
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
from orchestrrl.lab.scoreboard import codesign, decisions, fabrics, fidelity, generation, sensitivity
from orchestrrl.lab.scoreboard.claims import ScoreboardPart, ScoreboardRow
from orchestrrl.lab.sim.run import chosen as chosen_names

FIGURES: tuple[ScoreboardPart, ...] = (
    ScoreboardPart("2", "Section 2: a job on 72 GPUs", generation.workload),
    ScoreboardPart("2-phases", "Section 2.1: phases of a step", generation.phases),
    ScoreboardPart("4.1", "Section 4.1: forecast", decisions.forecast, "4 of 20 seeds in the first row"),
    ScoreboardPart("5", "Figure 5: slack", generation.slack),
    ScoreboardPart(
        "9",
        "Figure 9: throughput on the testbed",
        generation.headline,
        "only Qwen2.5-14B with 15,000 tokens, one seed",
    ),
    ScoreboardPart("10", "Figure 10: ablation of planning and balancing", generation.ablation, "only Qwen2.5-14B"),
    ScoreboardPart("11", "Figure 11: case study", generation.case_study),
    ScoreboardPart("12", "Figure 12: fidelity", fidelity.fidelity),
    ScoreboardPart(
        "13-dense",
        "Figure 13: throughput of fabrics, dense model",
        partial(fabrics.throughput, "qwen2.5-72b"),
        "only 512 GPUs",
    ),
    ScoreboardPart(
        "13-moe",
        "Figure 13: throughput of fabrics, mixture of experts",
        partial(fabrics.throughput, "qwen2-57b-a14b"),
        "only 512 GPUs",
    ),
    ScoreboardPart("14", "Figure 14: stages by fabric", fabrics.stage_times, "512 GPUs instead of 1,024"),
    ScoreboardPart("15", "Figure 15: cost", fabrics.costs),
    ScoreboardPart(
        "16", "Figure 16: throughput per dollar", fabrics.frontier, "only the mixture of experts at 200 Gbps"
    ),
    ScoreboardPart("17", "Figure 17: scheduler and fabric", codesign.two_by_two, "512 GPUs instead of 2,048"),
    ScoreboardPart(
        "18",
        "Figure 18: engine change",
        codesign.change_of_engines,
        "512 GPUs instead of 2,048, three times of the change instead of five",
    ),
    ScoreboardPart("20", "Figure 20: solver", decisions.solver, "only 1,024 GPUs"),
    ScoreboardPart("I", "Appendix I: circuits by traffic", sensitivity.allocation, "without weight sync"),
    ScoreboardPart("I-delays", "Section 7.2.5: reconfiguration delays", sensitivity.delays, "only the dense model"),
    ScoreboardPart("mixed", "Beyond the paper: mixed fleets", sensitivity.mixed_fleets, "up to 64 GPUs"),
    ScoreboardPart("sync", "Beyond the paper: weight sync", sensitivity.weight_sync),
    ScoreboardPart("additions", "Beyond the paper: additions", sensitivity.additions, "only the packing balancer"),
    ScoreboardPart("failures", "Beyond the paper: failures", sensitivity.failures),
)

NOT_HERE: Mapping[str, str] = {
    "fidelity.generation_afd": "there is no public implementation of AFD to measure; the paper's is internal",
    "fidelity.end_to_end": "needs a testbed that trains and generates; parts are tested separately (docs/fidelity.md)",
}


def chosen(wanted: Sequence[str]) -> list[ScoreboardPart]:
    """Return the figures named in `wanted`, or all figures if `wanted` is empty. A number such as `13` selects all
    parts of that figure. Raises ProblemFaults if a name is unknown."""
    known = list(dict.fromkeys(name for figure in FIGURES for name in _names(figure)))
    names = chosen_names(wanted, known, "--figures")
    return [figure for figure in FIGURES if any(name in names for name in _names(figure))]


def _names(figure: ScoreboardPart) -> tuple[str, str]:
    return figure.id.split("-")[0], figure.id


@dataclass(frozen=True, slots=True)
class Made:
    """The rows of a figure, and the time, in seconds, that it took to make them."""

    id: str
    title: str
    quick: str  # the reduction of a quick run; empty: none
    rows: tuple[ScoreboardRow, ...]
    seconds: float


_MADE = TypeAdapter(Made)


def code_digest() -> str:
    """Return a digest of all code on which the figures depend."""
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
    """Write a figure's file in `folder` atomically. `code` is the digest of the code that made the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, made.id, quick)
    partly = path.with_suffix(".part")
    partly.write_text(json.dumps({"code": code, **as_json(made)}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partly.replace(path)


def read(folder: Path, id: str, quick: bool, code: str) -> Made | None:
    """Read a figure's file in `folder`. Return None if the file does not exist, is invalid, or was written by code with
    a digest other than `code`."""
    try:
        document = json.loads(path_of(folder, id, quick).read_text(encoding="utf-8"))
        return _MADE.validate_python(document) if document["code"] == code else None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError):
        return None


def as_json(made: Made) -> dict[str, Any]:
    """Return a figure as a JSON document. An unbounded side of a range is null."""
    document: dict[str, Any] = json.loads(_MADE.dump_json(made))
    for fields, row in zip(document["rows"], made.rows, strict=True):
        fields["difference"] = row.difference
    return document


def all_rows(made: Sequence[Made]) -> list[ScoreboardRow]:
    return [row for each in made for row in each.rows]


Report = Callable[[str, int, int], None]  # current task, number done, total
# Figures that take minutes, the longest first. They are started before the others.
LONGEST_FIRST = ("17", "13-moe", "9", "16", "additions", "10", "18", "13-dense", "14")


def make(
    figures: Sequence[ScoreboardPart], quick: bool, folder: Path, report: Report, *, processes: int | None = None
) -> list[Made]:
    """Make those `figures` that are not yet stored in `folder`, and return all figures in the given order. Raises
    Permanent if a process dies. Figures that are finished by then remain stored."""
    code = code_digest()
    found = {figure.id: made for figure in figures if (made := read(folder, figure.id, quick, code)) is not None}
    missing = [figure.id for figure in figures if figure.id not in found]
    waiting = [*(id for id in LONGEST_FIRST if id in missing), *(id for id in missing if id not in LONGEST_FIRST)]
    report("kept from an earlier run", len(found), len(figures))
    for id, result in run_tasks(partial(_make, quick=quick), waiting, processes):
        if isinstance(result, ChildProcessError):
            raise Permanent(f"figure {id}: {result}; free memory and run it again")
        if isinstance(result, Exception):
            raise result
        write(folder, result, quick, code)
        found[id] = result
        report(f"figure {id} done", len(found), len(figures))
    return [found[figure.id] for figure in figures]


def _make(id: str, quick: bool) -> Made:
    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    figure, started_s = next(each for each in FIGURES if each.id == id), time.perf_counter()
    rows = tuple(figure.make(quick))
    return Made(id, figure.title, figure.quick if quick else "", rows, time.perf_counter() - started_s)
