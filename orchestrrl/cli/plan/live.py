"""`orchestrrl plan`: what the slow loop proposes and why, and an operator's word on it."""

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.control import DaemonOption, answer, call_daemon, follow
from orchestrrl.cli.fleet.status import control_text, fetch_status
from orchestrrl.cli.formats import duration, seconds, time_of_day
from orchestrrl.cli.groups import group
from orchestrrl.cli.journal import print_line
from orchestrrl.cli.lazy import control_pb2
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, stdout
from orchestrrl.cli.plan import explain
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.ttl import lifetime_faults
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

PlanId = Annotated[str, typer.Argument(metavar="[PLAN]", help="A plan's id; the latest if left out.")]
Reason = Annotated[str, typer.Option("--reason", help="Who and why, for the journal.")]
TimeToLive = Annotated[float, typer.Option("--ttl-s", help="Seconds until it ends by itself; 0: until released.")]


def show(plan: PlanId = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Show the plan in force, or the one named, and whether an operator has bound the planner.

    Example: `orchestrrl plan show`
    """
    found, status = call_daemon(daemon, _fetch(plan))
    control, now_unix_s = status["plan_control"], status["now_unix_s"]
    if as_json:
        print_json({**found, "control": control})
        return
    print_lines([*explain.headline(found, now_unix_s), f"planner: {control_text(control, now_unix_s)}"])


def explain_plan(plan: PlanId = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Say why a plan is as it is: its inputs' age, the alternatives, the fleet it wants, the reason of plan
    admission, predicted against actual.

    Example: `orchestrrl plan explain plan-3`
    """
    found, status = call_daemon(daemon, _fetch(plan))
    control, now_unix_s = status["plan_control"], status["now_unix_s"]
    if as_json:
        print_json({**found, "control": control, "calibration": status["plan_calibration"]})
        return
    print_lines(explain.headline(found, now_unix_s))
    optional = {"note", "takes", "moves", "of all samples"}
    if found["alternatives"]:
        print_table("Alternatives", explain.ALTERNATIVE_COLUMNS, explain.alternative_rows(found), optional=optional)
    if found["instances"]:
        print_table("Proposed fleet", explain.FLEET_COLUMNS, explain.fleet_rows(found))
    print_lines([*explain.predictions(found), explain.calibration(status["plan_calibration"])])
    print_lines(explain.histogram(found))
    stdout().print(f"planner: {control_text(control, now_unix_s)}")


def list_plans(
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many of the newest.")] = 10,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """List the newest plans, the latest first.

    Example: `orchestrrl plan list --limit 5`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return await answer(client, client.control.ListPlans, control_pb2.ListPlansRequest(limit=limit))

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
        return
    print_table(
        "Plans",
        ("plan", "made", "decision", "reason", "from", "to", "current", "proposed", "actual", "acted"),
        (_row(plan) for plan in found["plans"]),
        optional={"from"},
    )


def watch(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Print each plan as it is made, the latest first, until Ctrl-C; with --json, one object a line.

    Example: `orchestrrl plan watch --json`
    """

    async def conversation(client: "ControlClient") -> None:
        async for event in client.watch(client.control.WatchPlans, control_pb2.WatchPlansRequest()):
            seen = plain(event)
            print_line(json.dumps(seen) if as_json else _event_line(seen))

    follow(daemon, conversation)


def override(
    configuration: Annotated[str, typer.Argument(help="The configuration to have.", metavar="CONFIGURATION")],
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Replace the planner's choice by a configuration of yours, until released or expired.

    Example: `orchestrrl plan override tp4 --reason "tail is long today" --ttl-s 3600`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.OverridePlanRequest(configuration=configuration, reason=reason, ttl_s=_checked(ttl_s))
        return await answer(client, client.control.OverridePlan, order)

    _control(daemon, conversation, as_json)


def pin(
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Keep the deployment as it is, until released or expired.

    Example: `orchestrrl plan pin --reason "benchmark running" --ttl-s 600`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.PinPlanRequest(reason=reason, ttl_s=_checked(ttl_s))
        return await answer(client, client.control.PinPlan, order)

    _control(daemon, conversation, as_json)


def release(reason: Reason = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Give the planner its freedom back.

    Example: `orchestrrl plan release --reason "benchmark over"`
    """

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return await answer(client, client.control.ReleasePlan, control_pb2.ReleasePlanRequest(reason=reason))

    _control(daemon, conversation, as_json)


def _fetch(plan_id: str) -> Callable[["ControlClient"], Awaitable[tuple[dict[str, Any], dict[str, Any]]]]:
    """The plan, and the daemon's status: the operator's word on the planner, its calibration, the daemon's time."""

    async def conversation(client: "ControlClient") -> tuple[dict[str, Any], dict[str, Any]]:
        found = await answer(client, client.control.GetPlan, control_pb2.GetPlanRequest(plan_id=plan_id))
        return found, await fetch_status(client)

    return conversation


def _checked(ttl_s: float) -> float:
    if faults := lifetime_faults(ttl_s, "--ttl-s"):
        raise ProblemFaults(faults)
    return ttl_s


def _control(daemon: str, conversation: Callable[["ControlClient"], Awaitable[dict[str, Any]]], as_json: bool) -> None:
    control = call_daemon(daemon, conversation)
    if as_json:
        print_json(control)
        return
    until = "" if control["expires_unix_s"] is None else f", until {time_of_day(control['expires_unix_s'])}"
    stdout().print(f"planner: {control_text(control)}{until}")


def _row(plan: dict[str, Any]) -> tuple[object, ...]:
    return (
        plan["plan_id"],
        time_of_day(plan["created_unix_s"]),
        plan["decision"],
        plan["reason_code"],
        plan["current_configuration"] or None,
        plan["proposed_configuration"] or None,
        seconds(plan["current_makespan_s"]),
        seconds(explain.proposed_s(plan)),
        seconds(plan["actual_makespan_s"]),
        "yes" if plan["acted"] else "no",
    )


def _event_line(event: dict[str, Any]) -> str:
    plan = event["plan"]
    if plan is None:
        return f"no plan yet; planner {control_text(event['control'])}"
    times = f"{seconds(plan['current_makespan_s'])} now, {seconds(explain.proposed_s(plan))} proposed"
    solved = f"solved in {duration(plan['solve_s'])}"
    made = f"{time_of_day(plan['created_unix_s'])} {plan['plan_id']}"
    return f"{made} {plan['decision']}: {plan['reason']} ({times}; {solved})"


def register(app: typer.Typer) -> None:
    plans = group(app, "plan")
    plans.command("show")(show)
    plans.command("explain")(explain_plan)
    plans.command("list")(list_plans)
    plans.command("watch")(watch)
    plans.command("override")(override)
    plans.command("pin")(pin)
    plans.command("release")(release)
