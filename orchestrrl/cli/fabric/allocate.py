"""`orchestrrl fabric allocate`: how many circuits each pair of endpoints gets, for a demand in a file."""

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BeforeValidator, Field

from orchestrrl.cli.command import ProblemFile, problem_command
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Output, View, cells_table
from orchestrrl.cli.problem import ProblemPart, ids_exist, read_problem, unique, values_at
from orchestrrl.core.errors import path_of, shorten

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
    # Imported before the clock starts, which is for solving.
    from planner.fabric.allocate import allocate

    problem = problem_of(read_problem(file, AllocateProblem, CHECKS))
    started_s = time.perf_counter()
    allocation = allocate(problem, bipartite=bipartite)
    solve_s = time.perf_counter() - started_s
    return Output(_json(allocation, solve_s), _view(problem, allocation, solve_s))


MOST_PORTS = 2**16  # of one endpoint; beyond any switch, and circuits are dealt out one by one
SLOWEST_GBPS, FASTEST_GBPS, MOST_BYTES = 1e-9, 1e12, 1e30  # what goes beyond is a slip, and its seconds no number


class AllocateEndpointPart(ProblemPart):
    id: str
    ports: int = Field(ge=0, le=MOST_PORTS)


class DemandPart(ProblemPart):
    src: str
    dst: str
    bytes: float = Field(ge=0, le=MOST_BYTES)


def _ends(value: Any) -> Any:
    """A pair written as circuits are in the answer is a pair too."""
    return [value["a"], value["b"]] if isinstance(value, dict) and value.keys() == {"a", "b"} else value


EligiblePart = Annotated[list[str], BeforeValidator(_ends), Field(min_length=2, max_length=2)]


class AllocateProblem(ProblemPart):
    link_gbps: float = Field(ge=SLOWEST_GBPS, le=FASTEST_GBPS)
    endpoints: list[AllocateEndpointPart]
    demand: list[DemandPart]
    eligible: list[EligiblePart] | None
    failed_ports: dict[str, Annotated[int, Field(ge=0)]]


def _two_ends(document: Any) -> Iterator[str]:
    for location, each in values_at(document, "demand[]"):
        if isinstance(each, dict) and isinstance(each.get("src"), str) and each["src"] == each.get("dst"):
            yield f"{path_of((*location, 'dst'))}: must differ from src, got {shorten(each['dst'])}"
    for location, each in values_at(document, "eligible[]"):
        ends = _ends(each)
        if isinstance(ends, list) and len(ends) == 2 and isinstance(ends[0], str) and ends[0] == ends[1]:
            yield f"{path_of(location)}: must be two endpoints, got {shorten(each)}"


CHECKS = (
    unique("endpoints[].id"),
    ids_exist("demand[].src", "endpoints[].id"),
    ids_exist("demand[].dst", "endpoints[].id"),
    ids_exist("eligible[][]", "endpoints[].id"),
    ids_exist("eligible[].a", "endpoints[].id"),
    ids_exist("eligible[].b", "endpoints[].id"),
    _two_ends,
    ids_exist("failed_ports{}", "endpoints[].id"),
)


def problem_of(read: AllocateProblem) -> "AllocationProblem":
    from planner.fabric.allocate import AllocationProblem
    from planner.fabric.model import EndpointId, pair_of

    demand: defaultdict[tuple[EndpointId, EndpointId], float] = defaultdict(float)
    for each in read.demand:
        demand[EndpointId(each.src), EndpointId(each.dst)] += each.bytes
    return AllocationProblem(
        link_gbps=read.link_gbps,
        ports={EndpointId(each.id): each.ports for each in read.endpoints},
        demand=dict(demand),
        eligible=None
        if read.eligible is None
        else frozenset(pair_of(EndpointId(a), EndpointId(b)) for a, b in read.eligible),
        failed_ports={EndpointId(endpoint): count for endpoint, count in read.failed_ports.items()},
    )


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
