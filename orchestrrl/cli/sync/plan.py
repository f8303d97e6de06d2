"""`orchestrrl sync plan`: how a weight version reaches every engine, for a site and shards in a file."""

import math
import time
from typing import TYPE_CHECKING, Any

from orchestrrl.cli.command import ProblemFile, problem_command
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import EXIT_INFEASIBLE, Output, View, cells_table, fail

if TYPE_CHECKING:
    from planner.sync_tree.model import SyncPlan, SyncProblem, Wave

ROWS_SHOWN = 30  # waves


@problem_command("sync_plan")
def plan(file: ProblemFile) -> Output:
    """Plan a tree broadcast of new weights: who sends which bytes to whom, in waves.

    Reads one JSON problem: `link_gbps`; `pods` with the circuits that may cross their boundary; `endpoints` with their
    PoD, ToR and NIC; `tor_circuits`, upwards; `shards`, each with its `bytes`, who holds it and who receives it;
    `seeds_per_pod`, how many may receive the same bytes from outside; `chunk_bytes` and `hop_latency_s` of what is
    forwarded while it comes. Phase A crosses PoDs over circuits, phase B fans out inside. The estimate is the model's
    time of the very waves that are printed, beside a bound that no plan beats and the best that every receiver straight
    from a holder could do. Nothing is sent. Exit status 3: a PoD or ToR has no circuits and shards have to pass it.

    Where PoDs are joined as they are, by circuits that exist or by Ethernet across sites, `links` say which two, with
    how many circuits in each direction, of which rate: `[{"a", "b", "circuits", "gbps"}]`. There is no way but these
    then.

    Example:

        orchestrrl sync plan --print-example > sync.json

        orchestrrl sync plan sync.json

        orchestrrl sync plan - --json < sync.json
    """
    # Imported here so that no other command waits for them; before the clock starts, which is for solving.
    from orchestrrl.cli.problem import read_problem
    from orchestrrl.cli.problems import SYNC_CHECKS, SyncPlanProblem, sync_problem_of
    from planner.sync_tree.model import Unreachable
    from planner.sync_tree.plan import make_plan

    problem = sync_problem_of(read_problem(file, SyncPlanProblem, SYNC_CHECKS))
    started_s = time.perf_counter()
    try:
        made = make_plan(problem)
    except Unreachable as error:
        fail(f"infeasible: {error}", EXIT_INFEASIBLE)
    solve_s = time.perf_counter() - started_s
    return Output(_json(problem, made, solve_s), _view(made, solve_s))


def _json(problem: "SyncProblem", plan: "SyncPlan", solve_s: float) -> dict[str, Any]:
    return {
        "waves": [
            {"wave": number, "seconds": wave.seconds, "edges": _edges(problem, wave)}
            for number, wave in enumerate(plan.waves)
        ],
        "estimate_s": plan.estimate_s,
        "lower_bound_s": plan.lower_bound_s,
        "naive_s": plan.naive_s if math.isfinite(plan.naive_s) else None,  # with `links`: not all are joined directly
        "solve_s": solve_s,
    }


def _edges(problem: "SyncProblem", wave: "Wave") -> list[dict[str, Any]]:
    edges = wave.edges
    columns = (edges.shard, edges.offset, edges.bytes, edges.src, edges.dst, edges.circuits, edges.rate_gbps)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        {
            "shard": problem.shards[shard].id,
            "offset": offset,
            "bytes": size,
            "src": problem.endpoints[src],
            "dst": problem.endpoints[dst],
            "phase": "A" if circuits else "B",
            "circuits": circuits,
            "rate_gbps": rate_gbps,
        }
        for shard, offset, size, src, dst, circuits, rate_gbps in rows
    ]


def _view(plan: "SyncPlan", solve_s: float) -> View:
    if not plan.waves:
        yield "Nothing to send: no shard has a receiver that does not hold it."
        return
    edges = sum(len(wave.edges.bytes) for wave in plan.waves)
    yield (
        f"[bold]{duration(plan.estimate_s)}[/bold] in {len(plan.waves):,} waves of {edges:,} edges:"
        f" {plan.estimate_s / plan.lower_bound_s:.2f} times the bound of {duration(plan.lower_bound_s)};"
        f" {_naive(plan)}; solved in {duration(solve_s)}"
    )
    shown = plan.waves[:ROWS_SHOWN]
    title = "Waves" if len(shown) == len(plan.waves) else f"The first {ROWS_SHOWN} of {len(plan.waves):,} waves"
    columns = ("wave", "takes", "GB delivered", "PoD to PoD", "circuits", "inside PoDs", "deepest", "shards")
    yield cells_table(title, columns, (_row(number, wave) for number, wave in enumerate(shown)))


def _naive(plan: "SyncPlan") -> str:
    if not math.isfinite(plan.naive_s):
        return "straight from the holders no link leads everywhere"
    return f"straight from the holders {duration(plan.naive_s)}, {plan.naive_s / plan.estimate_s:.1f} times as long"


def _row(number: int, wave: "Wave") -> tuple[object, ...]:
    edges = wave.edges
    crossing = edges.circuits > 0
    return (
        number,
        duration(wave.seconds),
        f"{edges.bytes.sum() / 1e9:,.3g}",
        int(crossing.sum()),
        int(edges.circuits.sum()),
        int((~crossing).sum()),
        int(edges.above.max()) + 1,
        len(set(edges.shard.tolist())),
    )
