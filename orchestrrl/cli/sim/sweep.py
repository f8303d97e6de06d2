"""`orchestrrl sim sweep`: many cluster scenarios, on all cores of this machine or on a Ray cluster."""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Columns, Output, fields, note, table
from orchestrrl.cli.progress import with_progress
from orchestrrl.cli.sim.cluster import rate_of, usd_of
from orchestrrl.cli.sim.generation import check_folder, make_folder, or_faults
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.lab.sim.rl.results import SummaryRow
    from orchestrrl.lab.sim.rl.sweep import SweepPoint, Swept


@command
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="A base scenario, and values at dotted paths.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Results: a file for each point.")] = Path("sweep"),
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each core.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="On this Ray cluster: auto or HOST:PORT.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also the points whose results are there.")] = False,
) -> Output:
    """Run every combination of values over a base scenario: `base: cluster64`, `grid: {cluster.nic_gbps: [100, 400]}`.

    Points whose results are there already are not run again: a sweep that was cut short goes on. A point that fails is
    told, and the rest goes on (exit status 1 in the end).

    Example: `orchestrrl sim sweep sweep.yaml --out out/sweep && orchestrrl sim report out/sweep`
    """
    from orchestrrl.lab.sim.rl import sweep as sweeps
    from orchestrrl.lab.sim.rl.results import SUFFIX, parse, rows

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    if ray is not None and workers is not None:
        raise ProblemFaults([f"--workers: is not for --ray, got {workers}"])
    faults: list[str] = []
    points = or_faults(faults, lambda: sweeps.load_sweep(file))
    or_faults(faults, lambda: check_folder(out, "--out"))
    if points is None or faults:
        raise ProblemFaults(faults)
    make_folder(out, "--out")
    runner = partial(sweeps.on_ray, address=ray) if ray is not None else partial(sweeps.in_processes, at_once=workers)
    try:
        swept = with_progress(lambda report: sweeps.sweep(points, out, runner, report, again=again))
    except KeyboardInterrupt:
        note(escape(f"interrupted: points that are done are in {out}, and the same command goes on from there"))
        raise
    found = [
        (point, row)
        for point in swept.done
        for row in rows(parse((out / f"{point.digest}{SUFFIX}").read_text(encoding="utf-8")))
    ]
    for outcome in swept.failed:
        note(escape(f"failed: {outcome.point.title}: {outcome.fault}"))
    there = [f"{swept.found} were there already"] if swept.found else []
    shown = table(f"{len(swept.done)} of {len(points)} points", COLUMNS, found)
    failure = "" if swept.failed else None
    return Output(_document(found, swept), [shown, *there, escape(f"results are in {out}")], failure)


def _document(found: "list[tuple[SweepPoint, SummaryRow]]", swept: "Swept") -> dict[str, Any]:
    return {
        "points": [
            {"values": dict(point.values), "digest": point.digest} | fields(row, "fabric arm samples_per_s network_usd")
            for point, row in found
        ],
        "failed": [{"values": dict(each.point.values), "fault": each.fault} for each in swept.failed],
    }


COLUMNS: Columns = {
    "point": lambda pair: pair[0].title,
    "fabric": lambda pair: pair[1].fabric,
    "arm": lambda pair: pair[1].arm,
    "samples/s": lambda pair: rate_of(pair[1]),
    "network": lambda pair: usd_of(pair[1]),
}
