"""`orchestrrl plan history`: redeployments that were carried out, and what took how long in each."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.formats import duration
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import control_pb2
from orchestrrl.cli.lazy import redeploy_text as words
from orchestrrl.cli.output import JsonFlag, print_json, print_lines, print_table, stdout
from orchestrrl.core.addresses import DEFAULT_TARGET

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

COLUMNS = ("redeployment", "began", "plan", "why", "change", "outcome", "took", "stood still", "moved", "kept")


def history(
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many of the newest.")] = 20,
    redeployment_id: Annotated[
        str, typer.Option("--id", metavar="REDEPLOYMENT", help="One in full, with a time line.")
    ] = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """List the redeployments that were carried out, newest first; with --id, what took how long in one.

    Example: `orchestrrl plan history --limit 5`
    """
    if redeployment_id:
        _one(daemon, redeployment_id, as_json)
        return

    async def conversation(client: "ControlClient") -> dict[str, Any]:
        wanted = control_pb2.ListRedeploymentsRequest(limit=limit)
        return await answer(client, client.control.ListRedeployments, wanted)

    found = call_daemon(daemon, conversation)
    if as_json:
        print_json(found)
    elif not found["redeployments"]:
        print_lines(["no redeployment has been made yet"])
    else:
        print_table(
            "Redeployments",
            COLUMNS,
            map(_row, found["redeployments"]),
            optional={"plan", "why"},
            left={"why", "change"},
        )


def _one(daemon: str, redeployment_id: str, as_json: bool) -> None:
    async def conversation(client: "ControlClient") -> dict[str, Any]:
        return await answer(
            client, client.control.GetRedeployment, control_pb2.GetRedeploymentRequest(redeployment_id=redeployment_id)
        )

    report = call_daemon(daemon, conversation)
    if as_json:
        print_json(report)
        return
    print_lines([words.begun(report), f"began {_moment(report['created_unix_s'])}", *words.outcome(report)])
    print_table("Engines", words.ENGINE_COLUMNS, words.engine_rows(report), left=words.WORDY)
    if report["steps"]:
        stdout().print(words.time_line(report, time.time()))


def _row(report: dict[str, Any]) -> tuple[object, ...]:
    return (
        report["redeployment_id"],
        _moment(report["created_unix_s"]),
        report["plan_id"] or None,
        report["reason"] or None,
        words.change_text(report),
        words.state_text(report),
        duration(words.elapsed_s(report)),
        duration(report["closed_s"]),
        report["requests_moved"],
        report["requests_parked"],
    )


def _moment(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def register(app: typer.Typer) -> None:
    plans = group(app, "plan")
    plans.command("history")(history)
