"""`orchestrrl balance`: the moves that the fast loop would make on a fleet described in a file."""

from typing import Any

import typer
from pydantic import Field

from balancer.load import Problem, Request, Worker
from balancer.migrate import Balance, decide
from orchestrrl.cli.output import JsonFlag, print_json, print_table, reporting_errors, stdout
from orchestrrl.cli.problem import ProblemFile, ProblemPart, read_problem, unique
from planner.model import EngineId, RequestId

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


class RequestPart(ProblemPart):
    id: str
    context_tokens: int = Field(ge=0)


class WorkerPart(ProblemPart):
    id: str
    running: list[RequestPart]
    waiting: list[RequestPart]
    kv_capacity_tokens: int = Field(ge=0)
    kv_free_tokens: int = Field(ge=0)
    max_sequences: int = Field(ge=0)
    decode_tokens_per_s: float | None = Field(ge=0)


class BalanceProblem(ProblemPart):
    theta: float = Field(ge=0)
    workers: list[WorkerPart]


CHECKS = (unique("workers[].id"), unique("workers[].running[].id", "workers[].waiting[].id"))


def register(app: typer.Typer) -> None:
    app.command("balance", help=HELP)(balance)


def balance(file: ProblemFile, as_json: JsonFlag = False) -> None:
    with reporting_errors():
        result = decide(_problem(read_problem(file, BalanceProblem, CHECKS)))
    if as_json:
        print_json(_json(result))
    else:
        _show(result)


def _problem(read: BalanceProblem) -> Problem:
    return Problem(
        read.theta,
        tuple(
            Worker(
                id=EngineId(worker.id),
                running=_requests(worker.running),
                waiting=_requests(worker.waiting),
                kv_capacity_tokens=worker.kv_capacity_tokens,
                kv_free_tokens=worker.kv_free_tokens,
                max_sequences=worker.max_sequences,
                decode_tokens_per_s=worker.decode_tokens_per_s,
            )
            for worker in read.workers
        ),
    )


def _requests(parts: list[RequestPart]) -> tuple[Request, ...]:
    return tuple(Request(RequestId(part.id), part.context_tokens) for part in parts)


def _json(result: Balance) -> dict[str, Any]:
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


def _show(result: Balance) -> None:
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
    stdout.print(f"Spread {_shown(result.spread_before)} before, {_shown(result.spread_after)} after; stopped because")
    stdout.print(f"{STOPPED.get(result.stopped_because, result.stopped_because)} ({result.stopped_because}).")


def _shown(index: float | None) -> str:
    return "stalled" if index is None else f"{index:.4g}"
