"""`orchestrrl balance`: the moves that the fast loop would make on a fleet described in a file."""

from typing import TYPE_CHECKING, Any

import typer

from orchestrrl.cli.output import JsonFlag, ProblemFile, print_json, print_table, reporting_errors, stdout

if TYPE_CHECKING:
    from balancer.load_index_moves import Balance

STOPPED = {
    "within_theta": "the spread of load indices is within theta",
    "no_feasible_move": "no request can move: no room for it, or no gain from it",
}

HELP = """Say which requests to move so that no worker straggles, by the load index of equation 5.

Reads one JSON problem: `theta` and `workers`, each with `id`, `running`, `waiting`, `kv_capacity_tokens`,
`kv_free_tokens`, `max_sequences` and `decode_tokens_per_s` (null: unknown; 0 with running requests: stalled).
Nothing is moved.

Example:

    orchestrrl balance fleet.json

    orchestrrl balance - --json < fleet.json
"""


def register(app: typer.Typer) -> None:
    app.command("balance", help=HELP)(balance)


def balance(file: ProblemFile, as_json: JsonFlag = False) -> None:
    from balancer.load_index_moves import decide
    from orchestrrl.cli.fleet.balance_problem import CHECKS, BalanceDocument, problem_of
    from orchestrrl.cli.problem import read_problem

    with reporting_errors():
        result = decide(problem_of(read_problem(file, BalanceDocument, CHECKS)))
    if as_json:
        print_json(_json(result))
    else:
        _show(result)


def _json(result: "Balance") -> dict[str, Any]:
    return {
        "load_index": {
            worker: {"before": before, "after": result.load_after[worker]}
            for worker, before in result.load_before.items()
        },
        "spread_before": result.spread_before,
        "spread_after": result.spread_after,
        "migrations": [
            {"request": move.request, "from": move.source, "to": move.destination, "state": move.state.value}
            for move in result.moves
        ],
        "stopped_because": result.stopped_because,
    }


def _show(result: "Balance") -> None:
    leaving: dict[str, int] = {}
    arriving: dict[str, int] = {}
    for move in result.moves:
        leaving[move.source] = leaving.get(move.source, 0) + 1
        arriving[move.destination] = arriving.get(move.destination, 0) + 1
    print_table(
        "Load index",
        ("worker", "before", "after", "leaving", "arriving"),
        (
            (worker, _shown(before), _shown(result.load_after[worker]), leaving.get(worker), arriving.get(worker))
            for worker, before in result.load_before.items()
        ),
    )
    if result.moves:
        print_table(
            "Moves, in order",
            ("request", "from", "to", "state"),
            ((move.request, move.source, move.destination, move.state.value) for move in result.moves),
        )
    stdout().print(
        f"Spread {_shown(result.spread_before)} before, {_shown(result.spread_after)} after; stopped because"
    )
    stdout().print(f"{STOPPED.get(result.stopped_because, result.stopped_because)} ({result.stopped_because}).")


def _shown(index: float | None) -> str:
    return "stalled" if index is None else f"{index:.4g}"
