"""`orchestrrl plan solve`: the fleet and the placement of requests that end soonest, for a problem in a file."""

import gc
import math
import time
from typing import TYPE_CHECKING, Any

from orchestrrl.cli.command import ProblemFile, problem_command
from orchestrrl.cli.formats import duration, seconds
from orchestrrl.cli.output import Output, View, fields
from orchestrrl.cli.plan.explain import instances_table

if TYPE_CHECKING:
    from planner.solver.problem import MakespanProblem, Solution


@problem_command("plan_solve")
def solve(file: ProblemFile) -> Output:
    """Say which engines to run on which GPUs, and which request each decodes, so that the last one ends soonest.

    Reads one JSON problem: `gpus`, `configurations`, the `current` instances, `requests` with their estimated remaining
    tokens, and what moving and switching cost. Prints the decision with a proven lower bound. Nothing is changed.

    Example:

        orchestrrl plan solve --print-example > problem.json

        orchestrrl plan solve problem.json

        orchestrrl plan solve - --json < problem.json
    """
    # Imported here so that no other command waits for them; before the clock starts, which is for solving.
    from orchestrrl.cli.problem import infeasible, read_problem
    from orchestrrl.cli.problems import SOLVE_CHECKS, SolveProblem, makespan_problem_of
    from planner.solver import makespan

    gc.disable()  # the process ends soon, and looking through so many requests again and again is slow
    read = read_problem(file, SolveProblem, SOLVE_CHECKS)
    problem = makespan_problem_of(read)
    started_s = time.perf_counter()
    until_s = math.inf if read.time_budget_s is None else started_s + read.time_budget_s
    try:
        solution = makespan.solve(problem, stop=lambda: time.perf_counter() > until_s)
    except makespan.Infeasible as missed:
        infeasible(missed.limit, missed.needed, missed.available, missed.unit)
    result = _json(problem, solution)
    result["solve_s"] = time.perf_counter() - started_s
    return Output(result, _view(solution, result, banded=read.kv_balance is not None))


def _json(problem: "MakespanProblem", solution: "Solution") -> dict[str, Any]:
    ids = problem.requests.ids
    return {
        **fields(solution, "decision reason makespan_s current_makespan_s lower_bound_s gap"),
        "solve_s": 0.0,
        "kv_balance_violation": solution.kv_balance_violation,
        "instances": [
            {
                **fields(placed, "id configuration"),
                "gpus": list(placed.gpus),
                "requests": [ids[request] for request in placed.requests.tolist()],
                **fields(placed, "kept decode_s migration_s switch_s finish_s"),
            }
            for placed in solution.instances
        ],
        "migrations": [
            {"request": ids[move.request], "from": move.source, "to": move.destination} | fields(move, "method cost_s")
            for move in solution.migrations
        ],
    }


def _view(solution: "Solution", result: dict[str, Any], banded: bool) -> View:
    gap = "unknown" if solution.gap is None else f"{solution.gap * 100:.2f} %"
    yield f"[bold]{solution.decision}[/bold]: {solution.reason}"
    yield (
        f"makespan {seconds(solution.makespan_s)}; as placed now {seconds(solution.current_makespan_s)};"
        f" no placement ends before {seconds(solution.lower_bound_s)} (gap {gap});"
        f" solved in {duration(result['solve_s'])}"
    )
    names = [{"engine_id": each["id"], "requests_count": len(each["requests"])} for each in result["instances"]]
    counted = (each | more for each, more in zip(result["instances"], names, strict=True))
    yield instances_table("Instances", counted)
    if banded:
        yield f"KV balance: the worst instance misses the band by {solution.kv_balance_violation * 100:.2f} %"
    if solution.migrations:
        transfers = sum(move.method == "transfer" for move in solution.migrations)
        yield (
            f"{len(solution.migrations):,} running requests move: {transfers:,} by transfer,"
            f" {len(solution.migrations) - transfers:,} rebuilt"
        )
