"""`orchestrrl plan solve`: the fleet and the placement of requests that end soonest, for a problem in a file."""

import gc
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.formats import duration, ranges, seconds
from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, ProblemFile, print_json, print_lines, print_table, reporting_errors
from orchestrrl.cli.plan.example import print_example

if TYPE_CHECKING:
    from planner.solver.problem import MakespanProblem, PlacedInstance, Solution

LINES_SHOWN = 40  # instances; beyond that they are shown in groups

HELP = """Say which engines to run on which GPUs, and which request each decodes, so that the last one ends soonest.

Reads one JSON problem: `gpus`, `configurations`, the `current` instances, `requests` with their estimated remaining
tokens, and what moving and switching cost. Prints the decision with a proven lower bound. Nothing is changed.

Example:

    orchestrrl plan solve --print-example > problem.json

    orchestrrl plan solve problem.json

    orchestrrl plan solve - --json < problem.json
"""


def register(app: typer.Typer) -> None:
    plans = group(app, "plan")
    plans.command("solve", help=HELP)(solve_problem)


ExampleFlag = Annotated[
    bool,
    typer.Option("--print-example", help="Print an example problem and stop.", callback=print_example, is_eager=True),
]


def solve_problem(file: ProblemFile, as_json: JsonFlag = False, _example: ExampleFlag = False) -> None:
    # Imported here so that no other command waits for them; before the clock starts, which is for solving.
    from orchestrrl.cli.plan.solve_problem import CHECKS, SolveProblem, problem_of
    from orchestrrl.cli.problem import infeasible, read_problem
    from planner.solver.makespan import Infeasible, solve

    gc.disable()  # the process ends soon, and looking through so many requests again and again is slow
    with reporting_errors():
        read = read_problem(file, SolveProblem, CHECKS)
        problem = problem_of(read)
        started_s = time.perf_counter()
        until_s = math.inf if read.time_budget_s is None else started_s + read.time_budget_s
        try:
            solution = solve(problem, stop=lambda: time.perf_counter() > until_s)
        except Infeasible as missed:
            infeasible(missed.limit, missed.needed, missed.available, missed.unit)
        result = _json(problem, solution)
        result["solve_s"] = time.perf_counter() - started_s
    if as_json:
        print_json(result)
    else:
        _show(solution, result["solve_s"], banded=read.kv_balance is not None)


def _json(problem: "MakespanProblem", solution: "Solution") -> dict[str, Any]:
    ids = problem.requests.ids
    return {
        "decision": solution.decision,
        "reason": solution.reason,
        "makespan_s": solution.makespan_s,
        "current_makespan_s": solution.current_makespan_s,
        "lower_bound_s": solution.lower_bound_s,
        "gap": solution.gap,
        "solve_s": 0.0,
        "kv_balance_violation": solution.kv_balance_violation,
        "instances": [
            {
                "id": placed.id,
                "configuration": placed.configuration,
                "gpus": list(placed.gpus),
                "requests": [ids[request] for request in placed.requests.tolist()],
                "kept": placed.kept,
                "decode_s": placed.decode_s,
                "migration_s": placed.migration_s,
                "switch_s": placed.switch_s,
                "finish_s": placed.finish_s,
            }
            for placed in solution.instances
        ],
        "migrations": [
            {
                "request": ids[move.request],
                "from": move.source,
                "to": move.destination,
                "method": move.method,
                "cost_s": move.cost_s,
            }
            for move in solution.migrations
        ],
    }


def _show(solution: "Solution", solve_s: float, banded: bool) -> None:
    print_lines(
        [
            f"[bold]{solution.decision}[/bold]: {solution.reason}",
            f"makespan {seconds(solution.makespan_s)}; as placed now {seconds(solution.current_makespan_s)};"
            f" no placement ends before {seconds(solution.lower_bound_s)} (gap {_gap(solution)});"
            f" solved in {duration(solve_s)}",
        ]
    )
    rows = _grouped(solution.instances) if len(solution.instances) > LINES_SHOWN else map(_row, solution.instances)
    print_table(
        "Instances",
        ("instance", "configuration", "GPUs", "requests", "kept", "decode", "migration", "switch", "finish"),
        rows,
    )
    if banded:
        print_lines([f"KV balance: the worst instance misses the band by {solution.kv_balance_violation * 100:.2f} %"])
    if solution.migrations:
        transfers = sum(move.method == "transfer" for move in solution.migrations)
        print_lines(
            [
                f"{len(solution.migrations):,} running requests move: {transfers:,} by transfer,"
                f" {len(solution.migrations) - transfers:,} rebuilt"
            ]
        )


def _gap(solution: "Solution") -> str:
    return "unknown" if solution.gap is None else f"{solution.gap * 100:.2f} %"


def _row(placed: "PlacedInstance") -> tuple[object, ...]:
    return (
        placed.id,
        placed.configuration,
        ranges(placed.gpus),
        len(placed.requests),
        "yes" if placed.kept else "no",
        seconds(placed.decode_s),
        seconds(placed.migration_s),
        seconds(placed.switch_s),
        seconds(placed.finish_s),
    )


def _grouped(instances: "tuple[PlacedInstance, ...]") -> Iterator[tuple[object, ...]]:
    groups: dict[tuple[str, bool], list[PlacedInstance]] = {}
    for placed in instances:
        groups.setdefault((placed.configuration, placed.kept), []).append(placed)
    for (configuration, kept), members in groups.items():
        yield (
            f"{len(members):,} instances",
            configuration,
            f"{sum(len(placed.gpus) for placed in members):,}",
            f"{sum(len(placed.requests) for placed in members):,}",
            "yes" if kept else "no",
            *(
                f"up to {seconds(max(getattr(placed, name) for placed in members))}"
                for name in ("decode_s", "migration_s", "switch_s", "finish_s")
            ),
        )
