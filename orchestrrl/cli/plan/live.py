"""`orchestrrl plan`: show the plans of the slow loop and past redeployments, override the planner's choice, pin the
deployment, and release the planner."""

import time
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import Reason, TimeToLive, answer, daemon_command
from orchestrrl.cli.fleet.redeploy import fetch_redeployment
from orchestrrl.cli.fleet.status import control_text, fetch_status
from orchestrrl.cli.formats import duration, seconds, time_of_day
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.cli.lazy import redeploy_text as words
from orchestrrl.cli.output import Columns, Output, View, raise_faults, table
from orchestrrl.cli.plan import explain
from orchestrrl.core.errors import Permanent
from orchestrrl.core.ttl import lifetime_faults

PlanId = Annotated[str, typer.Argument(metavar="[PLAN]", help="The plan's id. Default: the latest.")]


@daemon_command
async def explain_(
    client: ControlClient,
    plan: PlanId = "",
    acted: Annotated[bool, typer.Option("--acted", help="Explain the latest plan that was carried out.")] = False,
) -> Output:
    """Explain a plan: its inputs, alternatives, proposed fleet, admission, and predicted and actual makespan.

    Example: `orchestrrl plan explain plan-3`
    """
    if acted:
        raise_faults([f"--acted: cannot be combined with PLAN, got {plan!r}"] if plan else [])
        stored = await answer(client, client.control.ListPlans, control_pb2.ListPlansRequest())
        plan = next((each["plan_id"] for each in stored["plans"] if each["acted"]), "")
        if not plan:
            raise Permanent(
                "no stored plan has been carried out completely; run `orchestrrl redeploy --watch` to follow a "
                "redeployment"
            )
    found = await answer(client, client.control.GetPlan, control_pb2.GetPlanRequest(plan_id=plan))
    status = await fetch_status(client)
    document = {**found, "control": status["plan_control"], "calibration": status["plan_calibration"]}
    return Output(document, _explain_view(found, status))


def _explain_view(found: dict[str, Any], status: dict[str, Any]) -> View:
    yield from explain.headline(found, status["now_unix_s"])
    if found["alternatives"]:
        yield explain.alternatives_table(found)
    if found["instances"]:
        yield explain.instances_table("Proposed fleet", found["instances"])
    yield from explain.predictions(found)
    yield explain.calibration(status["plan_calibration"])
    yield from explain.histogram(found)
    yield f"planner: {control_text(status['plan_control'], status['now_unix_s'])}"


@daemon_command
async def list_(
    client: ControlClient, limit: Annotated[int, typer.Option(min=1, help="Maximum number of plans.")] = 10
) -> Output:
    """List the latest plans, newest first.

    Example: `orchestrrl plan list --limit 5`
    """
    found = await answer(client, client.control.ListPlans, control_pb2.ListPlansRequest(limit=limit))
    return Output(found, table("Plans", PLAN_COLUMNS, found["plans"]))


@daemon_command
async def history(
    client: ControlClient,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of redeployments.")] = 20,
    redeployment_id: Annotated[
        str,
        typer.Option("--redeployment", metavar="REDEPLOYMENT", help="Show only this redeployment, with a timeline."),
    ] = "",
) -> Output:
    """List past redeployments, newest first. With --redeployment, show the steps of one redeployment over time.

    Example: `orchestrrl plan history --limit 5`
    """
    if redeployment_id:
        report = await fetch_redeployment(client, redeployment_id)
        return Output(report, _redeployment_view(report))
    wanted = control_pb2.ListRedeploymentsRequest(limit=limit)
    found = await answer(client, client.control.ListRedeployments, wanted)
    if not found["redeployments"]:
        return Output(found, ["no redeployment yet"])
    return Output(found, table("Redeployments", REDEPLOYMENT_COLUMNS, found["redeployments"]))


def _redeployment_view(report: dict[str, Any]) -> View:
    yield words.begun(report)
    yield f"started {_moment(report)}"
    yield from words.outcome(report)
    yield words.engines_table(report)
    if report["steps"]:
        yield words.time_line(report, time.time())


def _moment(report: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["created_unix_s"]))


@daemon_command
async def override(
    client: ControlClient,
    configuration: Annotated[str, typer.Argument(help="The configuration to deploy.", metavar="CONFIGURATION")],
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
) -> Output:
    """Override the planner's choice with a configuration until the override is released or expires.

    Example: `orchestrrl plan override tp4 --reason "tail is long today" --ttl-s 3600`
    """
    raise_faults(lifetime_faults(ttl_s, "--ttl-s"))
    order = control_pb2.OverridePlanRequest(configuration=configuration, reason=reason, ttl_s=ttl_s)
    return _control(await answer(client, client.control.OverridePlan, order))


@daemon_command
async def pin(client: ControlClient, reason: Reason = "", ttl_s: TimeToLive = 0.0) -> Output:
    """Keep the current deployment until the planner is released or the pin expires.

    Example: `orchestrrl plan pin --reason "benchmark running" --ttl-s 600`
    """
    raise_faults(lifetime_faults(ttl_s, "--ttl-s"))
    order = control_pb2.PinPlanRequest(reason=reason, ttl_s=ttl_s)
    return _control(await answer(client, client.control.PinPlan, order))


@daemon_command
async def release(client: ControlClient, reason: Reason = "") -> Output:
    """Release the planner from an override or a pin.

    Example: `orchestrrl plan release --reason "benchmark over"`
    """
    return _control(await answer(client, client.control.ReleasePlan, control_pb2.ReleasePlanRequest(reason=reason)))


def _control(control: dict[str, Any]) -> Output:
    until = "" if control["expires_unix_s"] is None else f", until {time_of_day(control['expires_unix_s'])}"
    return Output(control, [f"planner: {control_text(control)}{until}"])


PLAN_COLUMNS: Columns = {
    "plan": "plan_id",
    "created": lambda plan: time_of_day(plan["created_unix_s"]),
    "decision": "decision",
    "reason": "reason_code",
    "from": "current_configuration",
    "to": "proposed_configuration",
    "current": lambda plan: seconds(plan["current_makespan_s"]),
    "proposed": lambda plan: seconds(explain.proposed_s(plan)),
    "actual": lambda plan: seconds(plan["actual_makespan_s"]),
    "acted": "acted",
}
REDEPLOYMENT_COLUMNS: Columns = {
    "redeployment": "redeployment_id",
    "started": _moment,
    "plan": "plan_id",
    "reason": "reason",
    "change": lambda report: words.change_text(report),
    "outcome": lambda report: words.spaced(report["state"]),
    "took": lambda report: duration(words.elapsed_s(report)),
    "paused": lambda report: duration(report["closed_s"]),
    "moved": "requests_moved",
    "held": "requests_parked",
}
