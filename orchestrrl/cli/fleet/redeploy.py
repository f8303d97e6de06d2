"""`orchestrrl redeploy`: change which engines there are, watch it, take it back."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.control import DaemonOption, answer, call_daemon
from orchestrrl.cli.fleet.redeploy_follow import (
    advice,
    fetch_redeployment,
    first,
    poll_redeployment,
    reports,
    until_over,
)
from orchestrrl.cli.lazy import control_pb2
from orchestrrl.cli.lazy import redeploy_text as words
from orchestrrl.cli.output import JsonFlag, fail, print_json, print_lines, print_table, reporting_errors
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

MOST_ENGINES = (1 << 32) - 1


def redeploy(
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONFIGURATION[=N]",
            help="So many engines of it; without N: as many as the GPUs make that others leave. Repeat it. `nothing`:"
            " all stop, once their requests have finished.",
        ),
    ] = None,
    plan: Annotated[str, typer.Option(metavar="PLAN", help="The fleet that this plan proposes.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the steps; do nothing.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Begin, and leave it to itself.")] = False,
    status: Annotated[bool, typer.Option("--status", help="How it stands; the same as no target at all.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the one under way until it ends.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Go back to the engines from before.")] = False,
    redeployment_id: Annotated[
        str,
        typer.Option(
            "--id", metavar="REDEPLOYMENT", help="Which, for the last three; else the one under way, or last."
        ),
    ] = "",
    reason: Annotated[str, typer.Option(help="Who and why, for the journal.")] = "",
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Bring the fleet to other engines, in steps that can be taken back; without a target, say how the last one stands.

    Engines that stay serve on; requests of those that leave move or wait in their gateway. Whatever fails, all goes
    back to the engines from before. Exit status 0 when it is done, 1 when it went back or engines are missing. Ctrl-C
    leaves it running.

    Example: `orchestrrl redeploy --to tp2 --dry-run`

    Example: `orchestrrl redeploy --to tp2=3 --to tp1=2 --reason "the tail is short today"`
    """
    with reporting_errors():
        _check(
            to or [], plan, reason, {"--dry-run": dry_run, "--no-wait": no_wait}, redeployment_id, status, watch, cancel
        )
        targets = _targets(to or [])
    if not targets and not plan:
        if cancel:
            _cancel(daemon, redeployment_id, reason, as_json)
        elif watch:
            _end(until_over(daemon, lambda client: poll_redeployment(client, redeployment_id), as_json), as_json)
        else:
            _show(call_daemon(daemon, lambda client: fetch_redeployment(client, redeployment_id)), as_json)
        return
    order = control_pb2.RedeployRequest(targets=targets, plan_id=plan, dry_run=dry_run, reason=reason)
    if dry_run:
        _show_draft(call_daemon(daemon, lambda client: first(client, order)), as_json)
    elif no_wait:
        report = call_daemon(daemon, lambda client: first(client, order))
        if as_json:
            print_json(report)
        else:
            print_lines([words.begun(report), f"it runs by itself; {advice(report['redeployment_id'])}"])
    else:
        _end(until_over(daemon, lambda client: reports(client, order), as_json), as_json)


# --- what is asked


def _check(
    to: list[str],
    plan: str,
    reason: str,
    flags: dict[str, bool],
    redeployment_id: str,
    status: bool,
    watch: bool,
    cancel: bool,
) -> None:
    """Raises ProblemFaults with all that does not go together."""
    target, faults = bool(to or plan), []
    about = {"--status": status, "--watch": watch, "--cancel": cancel}
    asked = [flag for flag, on in about.items() if on]
    if to and plan:
        faults.append(f"--plan: cannot go with --to, got {plan!r}")
    faults += [f"{flag}: cannot go with --to or --plan" for flag in asked if target]
    faults += [f"{flag}: cannot go with {asked[0]}" for flag in asked[1:]]
    faults += [f"{flag}: needs --to or --plan" for flag, on in flags.items() if on and not target]
    if all(flags.values()):
        faults.append("--no-wait: cannot go with --dry-run")
    if redeployment_id and target:
        faults.append(f"--id: cannot go with --to or --plan, got {redeployment_id!r}")
    if reason and not target and not cancel:
        faults.append(f"--reason: needs --to, --plan or --cancel, got {reason!r}")
    try:
        _targets(to)
    except ProblemFaults as error:
        faults += error.faults
    if faults:
        raise ProblemFaults(faults)


def _targets(to: list[str]) -> "list[control_pb2.RedeployTarget]":
    targets: list[control_pb2.RedeployTarget] = []
    faults = []
    for wish in to:
        configuration, equals, number = wish.rpartition("=") if "=" in wish else (wish, "", "")
        well = not equals or (number.isascii() and number.isdecimal() and 0 < int(number) <= MOST_ENGINES)
        if not configuration.strip() or not well:
            faults.append(f"--to: must be CONFIGURATION or CONFIGURATION=N with N of at least 1, got {wish!r}")
        elif configuration in [target.configuration for target in targets]:
            faults.append(f"--to: must name a configuration once, got {wish!r} again")
        else:
            targets.append(control_pb2.RedeployTarget(configuration=configuration, engines=int(number or 0)))
    if faults:
        raise ProblemFaults(faults)
    return targets


# --- what is shown


def _end(report: dict[str, Any], as_json: bool) -> None:
    """The whole in a table; exit status 1 where it is not done."""
    if as_json:
        print_json(report)
    else:
        _print_taken(report)
        # Why it is not done goes to standard error, below.
        print_lines(words.outcome(report if report["state"] == "done" else {**report, "detail": ""}))
    if report["state"] != "done":
        because = report["detail"] or "no reason given"
        fail(f"redeployment {report['redeployment_id']} is {words.state_text(report)}: {because}")


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    print_lines([words.begun(report)])
    _print_taken(report)
    if report["state"] == "running":
        print_lines([words.progress(report), advice(report["redeployment_id"])])
    else:
        print_lines(words.outcome(report))


def _show_draft(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    print_lines([words.begun(report)])
    print_table("Engines", words.ENGINE_COLUMNS, words.engine_rows(report), left=words.WORDY)
    if not report["steps"]:
        print_lines(["the fleet is so already: there is nothing to do"])
        return
    print_table("Steps", words.PLAN_COLUMNS, words.plan_rows(report), optional={"side by side"}, left=words.WORDY)
    print_lines(["stages follow each other; within one, engines go on side by side, each through its steps in order"])


def _print_taken(report: dict[str, Any]) -> None:
    rows = words.taken_rows(report)
    print_table("Steps", words.TAKEN_COLUMNS, rows, optional={"slowest", "remark"}, left=words.WORDY)


def _cancel(daemon: str, redeployment_id: str, reason: str, as_json: bool) -> None:
    async def conversation(client: "ControlClient") -> dict[str, Any]:
        order = control_pb2.CancelRedeploymentRequest(redeployment_id=redeployment_id, reason=reason)
        return await answer(client, client.control.CancelRedeployment, order)

    report = call_daemon(daemon, conversation)
    if as_json:
        print_json(report)
        return
    named, before = escape(report["redeployment_id"]), escape(words.fleet_text(report["old_engines"]))
    watch = f"watch it with [bold]orchestrrl redeploy --watch --id {named}[/bold]"
    print_lines([f"redeployment [bold]{named}[/bold] goes back to {before}; {watch}"])


def register(app: typer.Typer) -> None:
    app.command("redeploy")(redeploy)
