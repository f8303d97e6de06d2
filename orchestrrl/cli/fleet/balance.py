"""`orchestrrl balance`: compute the moves of the fast loop for a fleet described in a file."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from orchestrrl.cli.command import ProblemFile, command
from orchestrrl.cli.output import Columns, Output, View, table

if TYPE_CHECKING:
    from balancer.load_index_moves import Balance

STOPPED = {
    "within_theta": "the spread of load indices is within theta",
    "no_feasible_move": "no move is feasible: the destination has no free KV, or the move has no gain",
}


@command
def balance(file: ProblemFile) -> Output:
    """Compute which requests to move so that no worker is a straggler, based on the load index (equation 5 of the
    paper).

    The command reads one JSON problem. The spread is the difference between the highest and the lowest load index. If
    it is at most `theta`, no move is needed. Each of the `workers` has `id`, `running`, `waiting`,
    `kv_capacity_tokens`, `kv_free_tokens`, `max_sequences` and `decode_tokens_per_s`. The decode rate is null if it is
    unknown. A worker with running requests and a rate of 0 is stalled. The command only prints the moves and does not
    carry them out.

    Example:

        orchestrrl balance fleet.json

        orchestrrl balance - --json < fleet.json
    """
    from balancer.load_index_moves import decide
    from orchestrrl.cli.problem import read_problem
    from orchestrrl.cli.problems import BALANCE_CHECKS, BalanceDocument, workers_of

    read = read_problem(file, BalanceDocument, BALANCE_CHECKS)
    result = decide(read.theta, workers_of(read))
    return Output(_json(result), _view(result))


def _json(result: "Balance") -> dict[str, Any]:
    return {
        "load_index": {
            worker: {"before": before, "after": result.load_after[worker]}
            for worker, before in result.load_before.items()
        },
        "spread_before": result.spread_before,
        "spread_after": result.spread_after,
        "migrations": [
            {"request": move.request, "from": move.from_engine, "to": move.to_engine, "state": move.state.value}
            for move in result.moves
        ],
        "stopped_because": result.stopped_because,
    }


def _view(result: "Balance") -> View:
    leaving = Counter(move.from_engine for move in result.moves)
    arriving = Counter(move.to_engine for move in result.moves)
    columns: Columns = {
        "worker": str,
        "before": lambda worker: _shown(result.load_before[worker]),
        "after": lambda worker: _shown(result.load_after[worker]),
        "leaving": leaving.get,
        "arriving": arriving.get,
    }
    yield table("Load index", columns, result.load_before)
    if result.moves:
        yield table("Moves, in order", MOVE_COLUMNS, result.moves)
    yield f"Spread {_shown(result.spread_before)} before, {_shown(result.spread_after)} after; stopped because"
    yield f"{STOPPED.get(result.stopped_because, result.stopped_because)} ({result.stopped_because})."


def _shown(index: float | None) -> str:
    return "stalled" if index is None else f"{index:.4g}"


MOVE_COLUMNS: Columns = {
    "request": "request",
    "from": "from_engine",
    "to": "to_engine",
    "state": lambda move: move.state.value,
}
