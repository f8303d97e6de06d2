"""`orchestrrl plan`: what the slow loop proposes and why, and an operator's word on it."""

from typing import Annotated, Any

import typer

from orchestrrl.cli.command import Reason, TimeToLive, daemon_command
from orchestrrl.cli.control import answer
from orchestrrl.cli.fleet.status import control_text, fetch_status
from orchestrrl.cli.formats import seconds, time_of_day
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.cli.output import Columns, Output, View, raise_faults, table
from orchestrrl.cli.plan import explain
from orchestrrl.core.ttl import lifetime_faults

PlanId = Annotated[str, typer.Argument(metavar="[PLAN]", help="A plan's id; the latest if left out.")]


@daemon_command
async def explain_(client: ControlClient, plan: PlanId = "") -> Output:
    """Say why a plan is as it is: its inputs' age, the alternatives, the fleet it wants, the reason of plan
    admission, predicted against actual.

    Example: `orchestrrl plan explain plan-3`
    """
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
    client: ControlClient, limit: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 10
) -> Output:
    """List the newest plans, the latest first.

    Example: `orchestrrl plan list --limit 5`
    """
    found = await answer(client, client.control.ListPlans, control_pb2.ListPlansRequest(limit=limit))
    return Output(found, table("Plans", COLUMNS, found["plans"]))


@daemon_command
async def override(
    client: ControlClient,
    configuration: Annotated[str, typer.Argument(help="The configuration to have.", metavar="CONFIGURATION")],
    reason: Reason = "",
    ttl_s: TimeToLive = 0.0,
) -> Output:
    """Replace the planner's choice by a configuration of yours, until released or expired.

    Example: `orchestrrl plan override tp4 --reason "tail is long today" --ttl-s 3600`
    """
    raise_faults(lifetime_faults(ttl_s, "--ttl-s"))
    order = control_pb2.OverridePlanRequest(configuration=configuration, reason=reason, ttl_s=ttl_s)
    return _control(await answer(client, client.control.OverridePlan, order))


@daemon_command
async def pin(client: ControlClient, reason: Reason = "", ttl_s: TimeToLive = 0.0) -> Output:
    """Keep the deployment as it is, until released or expired.

    Example: `orchestrrl plan pin --reason "benchmark running" --ttl-s 600`
    """
    raise_faults(lifetime_faults(ttl_s, "--ttl-s"))
    order = control_pb2.PinPlanRequest(reason=reason, ttl_s=ttl_s)
    return _control(await answer(client, client.control.PinPlan, order))


@daemon_command
async def release(client: ControlClient, reason: Reason = "") -> Output:
    """Give the planner its freedom back.

    Example: `orchestrrl plan release --reason "benchmark over"`
    """
    return _control(await answer(client, client.control.ReleasePlan, control_pb2.ReleasePlanRequest(reason=reason)))


def _control(control: dict[str, Any]) -> Output:
    until = "" if control["expires_unix_s"] is None else f", until {time_of_day(control['expires_unix_s'])}"
    return Output(control, [f"planner: {control_text(control)}{until}"])


COLUMNS: Columns = {
    "plan": "plan_id",
    "made": lambda plan: time_of_day(plan["created_unix_s"]),
    "decision": "decision",
    "reason": "reason_code",
    "from": "current_configuration",
    "to": "proposed_configuration",
    "current": lambda plan: seconds(plan["current_makespan_s"]),
    "proposed": lambda plan: seconds(explain.proposed_s(plan)),
    "actual": lambda plan: seconds(plan["actual_makespan_s"]),
    "acted": "acted",
}
