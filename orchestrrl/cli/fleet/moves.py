"""`orchestrrl moves`: the fast loop's last decision, and what became of moves."""

from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.fleet.status import policy_summary
from orchestrrl.cli.formats import duration, load_index, time_of_day
from orchestrrl.cli.lazy import control_pb2
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table
from orchestrrl.core.addresses import DEFAULT_TARGET

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

ENDED_COLUMNS = ("ended", "request", "from", "to", "by", "predicted", "actual", "loaded", "recomputed")


def moves(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Show the fast loop's last decision: load indices before and after, the moves, why no more. And how moves went.

    Example: `orchestrrl moves`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return await answer(client, client.control.GetBalance, control_pb2.GetBalanceRequest())

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
        return
    print_table(
        "Load index (equation 5)",
        ("worker", "before", "after"),
        ((load["engine_id"], _index(load["before"]), _index(load["after"])) for load in found["load_index"]),
    )
    if found["moves"]:
        print_table("Moves, in order", ("request", "from", "to", "state"), (move_row(move) for move in found["moves"]))
    print_lines(reasons(found))
    if found["ended_moves"]:
        print_table("Latest moves", ENDED_COLUMNS, (_ended_row(move) for move in found["ended_moves"]))


def reasons(found: dict[str, Any]) -> list[str]:
    """When and why, in words."""
    spread = f"spread {_index(found['spread_before'])} before, {_index(found['spread_after'])} after"
    return [
        f"decided at {time_of_day(found['decided_unix_s'])} on inputs at most {duration(found['inputs_age_s'])} old: "
        f"{escape(found['verdict_reason'])}",
        f"{spread}, theta {load_index(found['theta'])}; {len(found['moves'])} moves, "
        f"stopped because {escape(found['stopped_because'] or 'nothing was to be done')}",
        *policy_summary(found["policy"], found["policy_reason"]),
    ]


def move_row(move: dict[str, Any]) -> tuple[str, ...]:
    return move["request_id"], move["from_engine_id"], move["to_engine_id"], move["state"]


def _ended_row(move: dict[str, Any]) -> tuple[str | None, ...]:
    """A method other than the ordered one is the one that a move fell back to."""
    method, ordered = move["method"], move["ordered_method"]
    return (
        time_of_day(move["ended_unix_s"]),
        move["request_id"],
        move["from_engine_id"],
        move["to_engine_id"],
        method if method in ("", ordered) else f"{method}, not {ordered}",
        duration(move["predicted_s"]) if move["predicted_s"] else None,
        duration(move["actual_s"]) if move["actual_s"] else None,
        f"{move['loaded_tokens']:,}",
        f"{move['recomputed_tokens']:,}",
    )


def _index(value: float | None) -> str:
    return "stalled" if value is None else load_index(value)


def register(app: typer.Typer) -> None:
    app.command()(moves)
