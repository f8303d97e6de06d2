"""`orchestrrl top`: show the state of the fleet, refreshed every second by default."""

import contextlib
import json
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape

from orchestrrl.cli.command import DaemonOption, JsonFlag, answer, call_daemon, follow
from orchestrrl.cli.fleet.status import (
    WORKER_COLUMNS,
    balance_reasons,
    barrier_summary,
    control_text,
    fetch_status,
    fetch_weights,
    kv_used,
    summary,
    trouble,
    weights_summary,
)
from orchestrrl.cli.formats import bar, percent
from orchestrrl.cli.lazy import ControlClient, control_pb2, redeploy_text
from orchestrrl.cli.output import Columns, Output, print_line, stdout, table
from orchestrrl.cli.plan.explain import headline
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import OrchestrRLError, Permanent

MOVES_SHOWN = 8


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit. Default in a pipe.")] = False,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Show workers, moves and the plan, refreshed until Ctrl-C. With --json, print one JSON object per update.

    Example: `orchestrrl top --interval-s 2`
    """
    import asyncio

    if once or not (stdout().is_terminal or as_json):
        seen = call_daemon(daemon, fetch_all)
        Output(seen, [picture(seen)]).emit(as_json)
        return

    async def print_lines(client: ControlClient) -> None:
        while True:
            print_line(json.dumps(await fetch_all(client)))
            await asyncio.sleep(interval_s)

    async def show_live(client: ControlClient) -> None:
        first = await fetch_all(client)  # raises if there is no daemon, before the screen is cleared
        with Live(picture(first), console=stdout(), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                live.update(await _next_picture(client), refresh=True)

    follow(daemon, print_lines if as_json else show_live)


async def fetch_all(client: ControlClient) -> dict[str, Any]:
    """Fetch the data for one update: `status`, `balance`, `plan` and `weights`. An item that is not available yet is
    None."""
    seen: dict[str, Any] = {"status": await fetch_status(client), "balance": None, "plan": None}
    seen["weights"] = await fetch_weights(client)
    with contextlib.suppress(Permanent):
        seen["balance"] = await answer(client, client.control.GetBalance, control_pb2.GetBalanceRequest())
    with contextlib.suppress(Permanent):
        seen["plan"] = await answer(client, client.control.GetPlan, control_pb2.GetPlanRequest())
    return seen


def picture(seen: dict[str, Any]) -> RenderableType:
    status, balance, plan = seen["status"], seen["balance"], seen["plan"]
    whole, worries = summary(status), trouble(status)
    parts: list[RenderableType] = [*whole[: 4 + len(worries)], *barrier_summary(status["barrier"])]
    parts += weights_summary(seen["weights"], status["now_unix_s"])
    parts += redeploy_text.redeployment_summary(status["redeployment"])
    parts.append(table("", _columns(status["workers"]), status["workers"]))
    if balance is not None:
        parts += balance_reasons(balance)
        parts += [
            f"  {escape(move['request_id'])}: {move['from_engine_id']} -> {move['to_engine_id']} ({move['state']})"
            for move in balance["moves"][-MOVES_SHOWN:]
        ]
    else:
        parts.append("fast loop: no decision yet")
    if plan is not None:
        parts += headline(plan, status["now_unix_s"])
    else:
        parts.append("plan: none yet")
    parts.append(f"planner: {control_text(status['plan_control'], status['now_unix_s'])}")
    return Group(*parts)


async def _next_picture(client: ControlClient) -> RenderableType:
    """Return the next update for display. If fetching the data fails, return the error as text, so that the view
    continues."""
    try:
        return picture(await fetch_all(client))
    except OrchestrRLError as error:
        return f"[red]{escape(str(error))}[/red]"


def _columns(workers: list[dict[str, Any]]) -> Columns:
    """Return the columns of the table of workers. They are those of `orchestrrl status`, with bars added for requests
    and KV use."""
    most_waiting = max((worker["waiting"] for worker in workers), default=0)
    return {
        **WORKER_COLUMNS,
        "run": lambda worker: _bar(worker["running"], worker["max_sequences"] or worker["running"]),
        "wait": lambda worker: _bar(worker["waiting"], most_waiting),
        "KV used": lambda worker: None if (used := kv_used(worker)) is None else _bar(used, 1.0, percent(used)),
    }


def _bar(value: float, full: float, text: str = "") -> str:
    return f"{bar(value / full if full else 0.0, 12 if stdout().width >= 140 else 4)} {text or value}"
