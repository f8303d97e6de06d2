"""`orchestrrl redeploy`: replace the engines of the fleet, watch a redeployment, and cancel it."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import JsonFlag, Reason, answer, daemon_command
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.cli.lazy import redeploy_text as words
from orchestrrl.cli.output import Output, View, raise_faults
from orchestrrl.cli.progress import POLL_EVERY_S, persistently, until_over
from orchestrrl.core.errors import OutcomeUnknown
from orchestrrl.rpc.plain_values import plain

MOST_ENGINES = (1 << 32) - 1
# The daemon queries the capabilities of engines before it responds.
FIRST_WITHIN_S = 60.0
AWAY = "the daemon is unreachable: the redeployment continues, or is rolled back, when it is running again"


@daemon_command
async def redeploy(
    client: ControlClient,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONFIGURATION[=N]",
            help="Number of engines of a configuration. Without N: as many as fit on the remaining GPUs. Can be"
            " repeated. `nothing`: stop all engines once their requests have finished.",
        ),
    ] = None,
    plan: Annotated[str, typer.Option(metavar="PLAN", help="Deploy the fleet that this plan proposes.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the steps and change nothing.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Start the redeployment and return.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the running redeployment until it ends.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Roll back to the previous engines.")] = False,
    redeployment_id: Annotated[
        str,
        typer.Option(
            "--redeployment",
            metavar="REDEPLOYMENT",
            help="The redeployment to watch, cancel or show. Default: the running or last one.",
        ),
    ] = "",
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> Output:
    """Replace the fleet's engines in reversible steps. Without --to or --plan, show the last redeployment.

    Engines that are in both the old and the new fleet continue to serve. Requests on engines that stop are moved or
    wait in their gateway. If a step fails, the previous engines are restored. The exit status is 0 if the redeployment
    is done, and 1 if it is rolled back or engines are missing. Ctrl-C leaves the redeployment running.

    Example: `orchestrrl redeploy --to tp2 --dry-run`

    Example: `orchestrrl redeploy --to tp2=3 --to tp1=2 --reason "the tail is short today"`
    """
    targets, wrong = _targets(to or [])
    target = bool(to or plan)
    checks = (
        (to and plan, f"--plan: cannot go with --to, got {plan!r}"),
        (watch and target, "--watch: cannot go with --to or --plan"),
        (cancel and target, "--cancel: cannot go with --to or --plan"),
        (watch and cancel, "--cancel: cannot go with --watch"),
        (dry_run and not target, "--dry-run: needs --to or --plan"),
        (no_wait and not target, "--no-wait: needs --to or --plan"),
        (dry_run and no_wait, "--no-wait: cannot go with --dry-run"),
        (redeployment_id and target, f"--id: cannot go with --to or --plan, got {redeployment_id!r}"),
        (reason and not target and not cancel, f"--reason: needs --to, --plan or --cancel, got {reason!r}"),
    )
    raise_faults([*(fault for is_wrong, fault in checks if is_wrong), *wrong])
    if cancel:
        return await _cancel(client, redeployment_id, reason)
    if not targets and not plan:
        if watch:
            return await _followed(client, None, redeployment_id, as_json)
        report = await fetch_redeployment(client, redeployment_id)
        return Output(report, _view(report))
    order = control_pb2.RedeployRequest(targets=targets, plan_id=plan, dry_run=dry_run, reason=reason)
    if not dry_run and not no_wait:
        return await _followed(client, order, "", as_json)
    report = await _first(client, order)
    if dry_run:
        return Output(report, _draft_view(report))
    return Output(report, [words.begun(report), f"started; {advice(report['redeployment_id'])}"])


async def fetch_redeployment(client: ControlClient, redeployment_id: str) -> dict[str, Any]:
    request = control_pb2.GetRedeploymentRequest(redeployment_id=redeployment_id)
    return await answer(client, client.control.GetRedeployment, request)


# --- the request


def _targets(to: list[str]) -> "tuple[list[control_pb2.RedeployTarget], list[str]]":
    """Parse the values of `--to`. Return the targets, and an error message for each malformed value."""
    targets: list[control_pb2.RedeployTarget] = []
    faults: list[str] = []
    for wish in to:
        configuration, equals, number = wish.rpartition("=") if "=" in wish else (wish, "", "")
        well = not equals or (number.isascii() and number.isdecimal() and 0 < int(number) <= MOST_ENGINES)
        if not configuration.strip() or not well:
            faults.append(f"--to: must be CONFIGURATION or CONFIGURATION=N with N of at least 1, got {wish!r}")
        elif configuration in [target.configuration for target in targets]:
            faults.append(f"--to: must name a configuration only once, got {wish!r} again")
        else:
            targets.append(control_pb2.RedeployTarget(configuration=configuration, engines=int(number or 0)))
    return targets, faults


# --- its progress


async def _first(client: ControlClient, order: "control_pb2.RedeployRequest") -> dict[str, Any]:
    """Send `order` to the daemon and return the first report: the draft of a dry run, or the report of the redeployment
    that has started. Raises OutcomeUnknown if the daemon does not respond within FIRST_WITHIN_S seconds or closes the
    call without a response."""
    import asyncio

    try:
        async with asyncio.timeout(FIRST_WITHIN_S), aclosing(_ordered(client, order)) as reports:
            async for report in reports:
                return report
    except TimeoutError:
        raise OutcomeUnknown(f"the daemon at {client.address} did not respond within {FIRST_WITHIN_S:g} s") from None
    raise OutcomeUnknown(f"the daemon at {client.address} closed the call without a response")


async def _ordered(client: ControlClient, order: "control_pb2.RedeployRequest") -> AsyncGenerator[dict[str, Any]]:
    async for message in client.watch(client.control.Redeploy, order):
        yield plain(message)


async def _polled(client: ControlClient, redeployment_id: str) -> AsyncGenerator[dict[str, Any]]:
    import asyncio

    while True:
        report = await fetch_redeployment(client, redeployment_id)
        yield report
        if not _runs(report):
            return
        await asyncio.sleep(POLL_EVERY_S)


async def _followed(
    client: ControlClient, order: "control_pb2.RedeployRequest | None", redeployment_id: str, as_json: bool
) -> Output:
    """Follow a redeployment until it ends. Start the redeployment `order` or, if `order` is None, follow the
    redeployment `redeployment_id` (empty: the running redeployment)."""

    def fetch(latest: dict[str, Any] | None) -> AsyncIterator[dict[str, Any]]:
        if latest is None and order is not None:
            return _ordered(client, order)
        return _polled(client, redeployment_id if latest is None else latest["redeployment_id"])

    reports = persistently(fetch, lambda report: not _runs(report), AWAY)
    report = await until_over(reports, words.picture, words.news, _left, as_json)
    because = report["detail"] or "no reason given"
    failure = f"redeployment {report['redeployment_id']} is {words.spaced(report['state'])}: {because}"
    return Output(report, _end_view(report), None if report["state"] == "done" else failure)


def _runs(report: dict[str, Any]) -> bool:
    return bool(report["state"] == "running")


def _left(latest: dict[str, Any] | None) -> str:
    if latest is None:
        return "no response yet: the redeployment may have started; check with [bold]orchestrrl redeploy[/bold]"
    redeployment_id = latest["redeployment_id"]
    return f"redeployment [bold]{escape(redeployment_id)}[/bold] continues; {advice(redeployment_id)}"


def advice(redeployment_id: str) -> str:
    named = f" --redeployment {escape(redeployment_id)}"
    return (
        f"watch it with [bold]orchestrrl redeploy --watch{named}[/bold], "
        f"roll it back with [bold]orchestrrl redeploy --cancel{named}[/bold]"
    )


async def _cancel(client: ControlClient, redeployment_id: str, reason: str) -> Output:
    order = control_pb2.CancelRedeploymentRequest(redeployment_id=redeployment_id, reason=reason)
    report = await answer(client, client.control.CancelRedeployment, order)
    named, before = escape(report["redeployment_id"]), escape(words.fleet_text(report["old_engines"]))
    watch = f"watch it with [bold]orchestrrl redeploy --watch --redeployment {named}[/bold]"
    return Output(report, [f"redeployment [bold]{named}[/bold] is rolled back to {before}; {watch}"])


# --- views


def _end_view(report: dict[str, Any]) -> View:
    """Yield the steps and the outcome of a redeployment. The reason for a failure is omitted because the command prints
    it as its error message."""
    yield words.taken_table(report)
    yield from words.outcome(report if report["state"] == "done" else {**report, "detail": ""})


def _view(report: dict[str, Any]) -> View:
    yield words.begun(report)
    yield words.taken_table(report)
    if _runs(report):
        yield words.progress(report)
        yield advice(report["redeployment_id"])
    else:
        yield from words.outcome(report)


def _draft_view(report: dict[str, Any]) -> View:
    yield words.begun(report)
    yield words.engines_table(report)
    if not report["steps"]:
        yield "the fleet already has these engines: nothing to do"
        return
    yield words.plan_table(report)
    yield "stages run one after another; within a stage, engines proceed in parallel, each through its steps in order"
