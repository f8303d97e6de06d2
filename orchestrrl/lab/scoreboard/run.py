"""Make figures, side by side in processes of this machine; what was made before is not made again."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.processes import run_tasks
from orchestrrl.lab.scoreboard.figures import FIGURES
from orchestrrl.lab.scoreboard.kept import Made, code_digest, read, write
from orchestrrl.lab.scoreboard.model import ScoreboardPart

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
