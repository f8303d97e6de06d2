"""`orchestrrl fabric allocate`: how many circuits each pair of endpoints gets, for a demand in a file."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import ProblemFile, problem_command
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Output, View, cells_table

if TYPE_CHECKING:
    from planner.fabric.allocate import Allocation, AllocationProblem
    from planner.fabric.model import Pair

ROWS_SHOWN = 60  # pairs; beyond that the slowest are shown


@problem_command("fabric_allocate")
def fabric_allocate(
    file: ProblemFile,
    bipartite: Annotated[
        bool,
        typer.Option(
            "--bipartite",
            help="For demand between two sides with hot endpoints: spare their ports, and serve the most bytes.",
        ),
    ] = False,
) -> Output:
    """Say how many circuits each pair of endpoints gets, so that the slowest pair ends soonest.

    Reads one JSON problem: `link_gbps`; `endpoints` with their `ports`; `demand`, bytes from `src` to `dst` (those
    given twice add up); `eligible`, null or the pairs `[a, b]` that may be joined; `failed_ports` of endpoints (all it
    has, where it names more). Circuits are full duplex. No fewer pairs and bytes are served than by Algorithm 3 of the
    paper, and none later. Nothing is changed.

    Example:

        orchestrrl fabric allocate --print-example > demand.json

        orchestrrl fabric allocate demand.json

        orchestrrl fabric allocate - --json < demand.json
    """
    # Imported here so that no other command waits for them; before the clock starts, which is for solving.
    from orchestrrl.cli.fabric.problems import ALLOCATE_CHECKS, AllocateProblem, allocation_problem
    from orchestrrl.cli.problem import read_problem
    from planner.fabric.allocate import allocate

    problem = allocation_problem(read_problem(file, AllocateProblem, ALLOCATE_CHECKS))
    started_s = time.perf_counter()
    allocation = allocate(problem, bipartite=bipartite)
    solve_s = time.perf_counter() - started_s
    return Output(_json(allocation, solve_s), _view(problem, allocation, solve_s))


def _json(allocation: "Allocation", solve_s: float) -> dict[str, Any]:
    return {
        "circuits": [{"a": a, "b": b, "count": count} for (a, b), count in allocation.circuits.items()],
        "completion_s": allocation.completion_s,
        "unserved": [list(pair) for pair in allocation.unserved],
        "uniform_completion_s": allocation.uniform_completion_s,
        "solve_s": solve_s,
    }


def _view(problem: "AllocationProblem", allocation: "Allocation", solve_s: float) -> View:
    rows = [_row(problem, pair, count) for pair, count in allocation.circuits.items()]
    rows.sort(key=lambda row: (-row[0], row[1]))
    unserved = allocation.unserved
    pairs = f"{len(rows):,} of {len(rows) + len(unserved):,}" if unserved else f"{len(rows):,}"
    yield (
        f"[bold]{sum(allocation.circuits.values()):,} circuits[/bold] for {pairs} pairs: the slowest ends after"
        f" {duration(allocation.completion_s)}; with ports dealt out in turn, whatever the demand,"
        f" {duration(allocation.uniform_completion_s)}; solved in {duration(solve_s)}"
    )
    yield cells_table(
        "Pairs, slowest first" if len(rows) <= ROWS_SHOWN else f"The {ROWS_SHOWN} slowest of {len(rows):,} pairs",
        ("a", "b", "circuits", "a to b", "b to a", "seconds"),
        (
            (a, b, count, _bytes(there), _bytes(back), duration(value_s))
            for value_s, (a, b), count, there, back in rows[:ROWS_SHOWN]
        ),
    )
    if unserved:
        names = ", ".join(f"{a} - {b}" for a, b in unserved[:ROWS_SHOWN])
        more = f" and {len(unserved) - ROWS_SHOWN:,} more" if len(unserved) > ROWS_SHOWN else ""
        yield cells_table("Unserved", ("pairs", "which"), [(len(unserved), names + more)])


def _row(problem: "AllocationProblem", pair: "Pair", count: int) -> tuple[float, "Pair", int, float, float]:
    from planner.fabric.allocate import seconds

    there, back = (problem.demand.get(ends, 0.0) for ends in (pair, (pair[1], pair[0])))
    return seconds(max(there, back) / count, problem.link_gbps), pair, count, there, back


def _bytes(value: float) -> str | None:
    return f"{value / 1e9:,.3g} GB" if value else None
