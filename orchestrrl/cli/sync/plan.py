"""`orchestrrl sync plan`: plan the broadcast of a weight version to all engines, for a problem in a file."""

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
    """Plan a tree broadcast of new weights in waves, with the sender, receiver and byte range of each transfer.

    The command reads one JSON problem. `link_gbps` is the rate of a circuit. Each of the `pods` has a maximum number of
    circuits across its boundary, and each of the `endpoints` has a PoD, a ToR and the rate of its NIC. `tor_circuits`
    contains the number of circuits up from each ToR. Each of the `shards` has `bytes`, `holders` and `receivers`.
    `seeds_per_pod` is the maximum number of endpoints of a PoD that receive the same bytes from outside. `chunk_bytes`
    and `hop_latency_s` describe pipelined forwarding. Phase A crosses PoDs over circuits. Phase B fans out inside PoDs.
    The command prints the modelled time of the waves, a lower bound for any plan, and the best time if every receiver
    is served directly by a holder. Nothing is sent. The exit status is 3 if shards must cross a PoD or ToR that has no
    circuits.

    If PoDs have fixed links, such as existing circuits or Ethernet between sites, list them in `links` with the
    circuits per direction and their rate: `[{"a", "b", "circuits", "gbps"}]`. The plan then uses only these links.

    Example:

        orchestrrl sync plan --print-example > sync.json

        orchestrrl sync plan sync.json

        orchestrrl sync plan - --json < sync.json
    """
    # Imported here so that other commands start fast, and before the clock starts, which measures only the solver.
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
        "naive_s": plan.naive_s if math.isfinite(plan.naive_s) else None,  # None: `links` do not join all PoDs directly
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
        yield "Nothing to send: every receiver already holds its shards."
        return
    edges = sum(len(wave.edges.bytes) for wave in plan.waves)
    yield (
        f"[bold]{duration(plan.estimate_s)}[/bold] in {len(plan.waves):,} waves of {edges:,} edges:"
        f" {plan.estimate_s / plan.lower_bound_s:.2f} times the bound of {duration(plan.lower_bound_s)};"
        f" {_naive(plan)}; solved in {duration(solve_s)}"
    )
    shown = plan.waves[:ROWS_SHOWN]
    title = "Waves" if len(shown) == len(plan.waves) else f"The first {ROWS_SHOWN} of {len(plan.waves):,} waves"
    columns = ("wave", "time", "GB delivered", "PoD to PoD", "circuits", "inside PoDs", "depth", "shards")
    yield cells_table(title, columns, (_row(number, wave) for number, wave in enumerate(shown)))


def _naive(plan: "SyncPlan") -> str:
    if not math.isfinite(plan.naive_s):
        return "the holders have no direct links to all receivers"
    return f"directly from the holders {duration(plan.naive_s)}, {plan.naive_s / plan.estimate_s:.1f} times as long"


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
