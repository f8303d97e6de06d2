"""`orchestrrl plan history`: redeployments that were carried out, and what took how long in each."""

import time
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import daemon_command
from orchestrrl.cli.control import answer
from orchestrrl.cli.fleet.redeploy import fetch_redeployment
from orchestrrl.cli.formats import duration
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.cli.lazy import redeploy_text as words
from orchestrrl.cli.output import Columns, Output, View, table


@daemon_command
async def history(
    client: ControlClient,
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 20,
    redeployment_id: Annotated[
        str, typer.Option("--id", metavar="REDEPLOYMENT", help="One in full, with a time line.")
    ] = "",
) -> Output:
    """List the redeployments that were carried out, newest first; with --id, what took how long in one.

    Example: `orchestrrl plan history --limit 5`
    """
    if redeployment_id:
        report = await fetch_redeployment(client, redeployment_id)
        return Output(report, _one(report))
    wanted = control_pb2.ListRedeploymentsRequest(limit=limit)
    found = await answer(client, client.control.ListRedeployments, wanted)
    if not found["redeployments"]:
        return Output(found, ["no redeployment has been made yet"])
    return Output(found, table("Redeployments", COLUMNS, found["redeployments"]))


def _one(report: dict[str, Any]) -> View:
    yield words.begun(report)
    yield f"began {_moment(report)}"
    yield from words.outcome(report)
    yield words.engines_table(report)
    if report["steps"]:
        yield words.time_line(report, time.time())


def _moment(report: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["created_unix_s"]))


COLUMNS: Columns = {
    "redeployment": "redeployment_id",
    "began": _moment,
    "plan": "plan_id",
    "why": "reason",
    "change": lambda report: words.change_text(report),
    "outcome": lambda report: words.spaced(report["state"]),
    "took": lambda report: duration(words.elapsed_s(report)),
    "stood still": lambda report: duration(report["closed_s"]),
    "moved": "requests_moved",
    "kept": "requests_parked",
}
