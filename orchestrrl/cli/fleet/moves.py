"""`orchestrrl moves`: the fast loop's last decision, and what became of moves."""

from typing import Any

from rich.markup import escape

from orchestrrl.cli.command import daemon_command
from orchestrrl.cli.control import answer
from orchestrrl.cli.fleet.status import policy_summary
from orchestrrl.cli.formats import duration, load_index, time_of_day
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.cli.output import Columns, Output, View, table


@daemon_command
async def moves(client: ControlClient) -> Output:
    """Show the fast loop's last decision: load indices before and after, the moves, why no more. And how moves went.

    Example: `orchestrrl moves`
    """
    found = await answer(client, client.control.GetBalance, control_pb2.GetBalanceRequest())
    return Output(found, _view(found))


def _view(found: dict[str, Any]) -> View:
    yield table("Load index (equation 5)", LOAD_COLUMNS, found["load_index"])
    if found["moves"]:
        yield table("Moves, in order", MOVE_COLUMNS, found["moves"])
    yield from reasons(found)
    if found["ended_moves"]:
        yield table("Latest moves", ENDED_COLUMNS, found["ended_moves"])


def reasons(found: dict[str, Any]) -> list[str]:
    """Return when and why it was decided so, a line each."""
    spread = f"spread {_index(found['spread_before'])} before, {_index(found['spread_after'])} after"
    return [
        f"decided at {time_of_day(found['decided_unix_s'])} on inputs at most {duration(found['inputs_age_s'])} old: "
        f"{escape(found['verdict_reason'])}",
        f"{spread}, theta {load_index(found['theta'])}; {len(found['moves'])} moves, "
        f"stopped because {escape(found['stopped_because'] or 'nothing was to be done')}",
        *policy_summary(found["policy"], found["policy_reason"]),
    ]


def _index(value: float | None) -> str:
    return "stalled" if value is None else load_index(value)


def _method(move: dict[str, Any]) -> str:
    """A method other than the ordered one is the one that a move fell back to."""
    method, ordered = move["method"], move["ordered_method"]
    return str(method) if method in ("", ordered) else f"{method}, not {ordered}"


MOVE_COLUMNS: Columns = {"request": "request_id", "from": "from_engine_id", "to": "to_engine_id", "state": "state"}
LOAD_COLUMNS: Columns = {
    "worker": "engine_id",
    "before": lambda load: _index(load["before"]),
    "after": lambda load: _index(load["after"]),
}
ENDED_COLUMNS: Columns = {
    "ended": lambda move: time_of_day(move["ended_unix_s"]),
    "request": "request_id",
    "from": "from_engine_id",
    "to": "to_engine_id",
    "by": _method,
    "predicted": lambda move: duration(move["predicted_s"] or None),
    "actual": lambda move: duration(move["actual_s"] or None),
    "loaded": lambda move: f"{move['loaded_tokens']:,}",
    "recomputed": lambda move: f"{move['recomputed_tokens']:,}",
}
