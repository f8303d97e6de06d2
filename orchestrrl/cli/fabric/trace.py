"""`orchestrrl fabric trace`: write down what this host's recorders remember, for `orchestrrl fabric slack FILE`."""

from pathlib import Path
from typing import Annotated

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.output import EXIT_MALFORMED, Output, fail, writing


@command
def trace(
    target: Annotated[Path, typer.Argument(help="The trace; one that is there is replaced.", metavar="FILE.jsonl")],
    rings: Annotated[
        Path | None, typer.Option(help="Where recorders write. Default: as theirs.", metavar="FOLDER")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Whose ranks; needed where there are several.")] = None,
) -> Output:
    """Write the collectives and marks that this host's recorders still remember into a trace.

    A ring holds the latest events of its process, the job need not stop for it. `orchestrrl fabric slack` reads one
    file or those of several hosts; times in them are Unix time.

    Example: `orchestrrl fabric trace rank0.jsonl --job trainer && orchestrrl fabric slack rank0.jsonl`
    """
    from orchestrrl.fabric.traces import read_rings, recorded_jobs, write_trace
    from orchestrrl.integrations.instrument.rings import DEFAULT_DIRECTORY

    folder = DEFAULT_DIRECTORY if rings is None else rings
    jobs = recorded_jobs(folder)
    if job is None:
        if len(jobs) > 1:
            fail(f"--job: is missing, there are {', '.join(map(repr, jobs))}", EXIT_MALFORMED)
        job = next(iter(jobs), "")
    elif jobs and job not in jobs:
        fail(f"{folder}: no job {job!r} is recorded there, but {', '.join(map(repr, jobs))}")
    found = read_rings(folder, job)
    with writing(target):
        write_trace(found.events, target)
    counts = {"events": len(found.events), "lost": found.lost, "running": found.running}
    document = {"file": str(target), "job": job, "ranks": sorted(found.ranks), **counts}
    lines = [f"{target}: {len(found.events):,} events of {len(found.ranks)} ranks"]
    if found.lost:
        lines.append(f"{found.lost:,} older events are gone: rings are of a limited size")
    if found.running:
        lines.append(f"{found.running:,} collectives that still run are left out")
    return Output(document, lines)
