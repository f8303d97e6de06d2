"""`orchestrrl sync status|history|profile|watch|abort|install`: new weights of a running daemon's fleet."""

import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from orchestrrl.cli.control import DaemonOption, call_daemon
from orchestrrl.cli.groups import group
from orchestrrl.cli.lazy import sync_text as words
from orchestrrl.cli.lazy import weights_pb2 as pb
from orchestrrl.cli.output import JsonFlag, fail, print_json, print_lines, print_table, reporting_errors, stderr, stdout
from orchestrrl.cli.plan.live import Reason
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient
    from orchestrrl.weights.controller.profile import SyncProfile
    from orchestrrl.weights.controller.reports import SyncReport, WeightsStatus

SHOWN = 20
POLL_EVERY_S = 0.5
LARGEST = 2**64 - 1
MOST_PROFILED = 1000
UNDER_WAY = 8  # that are not over yet, at most
EXIT_LEFT = 130  # as shells have it for Ctrl-C: what it came to is not known

SyncArgument = Annotated[str, typer.Argument(metavar="SYNC", help="Its id; else the one under way.")]


def status(daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Show the fleet's version, the sync under way and who is late in it, engines without it, and all peers.

    Example: `orchestrrl sync status`
    """

    async def conversation(client: "ControlClient") -> "pb.WeightsStatus":
        return await client.call(client.weights.GetWeights, pb.GetWeightsRequest())

    message = call_daemon(daemon, conversation)
    if as_json:
        print_json(plain(message))
        return
    seen = _status(message)
    print_lines(words.status_lines(seen, time.time()))
    if seen.sync is not None and not seen.sync.over:
        _print_engines(seen.sync)
    if seen.peers:
        print_table("Peers", words.PEER_COLUMNS, words.peer_rows(seen.peers), left=words.WORDY)
    else:
        print_lines([words.NO_PEERS])


def history(
    limit: Annotated[int, typer.Option("--limit", min=1, max=MOST_PROFILED, help="At most this many.")] = SHOWN,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """List what became of the latest versions: seconds in all, of the transfer and of installing, and against its plan.

    Example: `orchestrrl sync history --limit 50`
    """

    async def conversation(client: "ControlClient") -> "pb.ListSyncsResponse":
        return await client.call(client.weights.ListSyncs, pb.ListSyncsRequest(limit=limit))

    listed = call_daemon(daemon, conversation)
    if as_json:
        print_json(plain(listed))
        return
    reports = [_report(each) for each in listed.syncs]
    if not reports:
        print_lines([words.NONE_YET])
        return
    print_table("Versions", words.HISTORY_COLUMNS, words.history_rows(reports, time.time()), left=words.WORDY)
    print_lines(words.outcome(report) for report in reports if report.over and not words.is_well(report))


def profile(
    version: Annotated[
        int | None, typer.Argument(metavar="VERSION", min=0, max=LARGEST, help="Of which version; else of the last.")
    ] = None,
    last: Annotated[
        int, typer.Option("--last", min=1, max=MOST_PROFILED, help="Of so many that are over, together.")
    ] = 1,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw its phases over time: .png, .svg or .pdf.")
    ] = None,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Show where the time of a version went, phase by phase, and what to do about it.

    The share is that of the time which was waited for a phase, from the trainer's first move until requests run by the
    new version. Circuits that are taken down, and waiting for somebody to close the pause barrier, are beside it:
    nobody waits for them. Transfer and edges stand against the plan's estimate and a bound that no plan beats.

    Example: `orchestrrl sync profile 12`

    Example: `orchestrrl sync profile --last 10 --picture syncs.png`
    """
    from orchestrrl.weights.controller.profile import profile as profile_of

    with reporting_errors():
        if version is not None and last > 1:
            raise ProblemFaults([f"--last: cannot go with a version, got {last}"])
    reports = call_daemon(daemon, lambda client: _profiled(client, version, last))
    profiles = [profile_of(report, time.time()) for report in reports]
    if picture is not None:
        _draw(profiles, picture)
    if as_json:
        told = [_profile_json(each) for each in profiles]
        print_json(told[0] if last == 1 else {"profiles": told})
    elif last == 1:
        _show_profile(profiles[0])
    else:
        _show_last(profiles)
    if picture is not None and not as_json:
        print_lines([f"wrote {escape(str(picture))}"])


def watch(sync_id: SyncArgument = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False) -> None:
    """Follow a sync until it is over. Ctrl-C leaves it running.

    Exit status 0 when every engine has the version; 1 when the fleet has the one from before, a newer one came first,
    or engines are in quarantine.

    Example: `orchestrrl sync watch`
    """
    latest: list[pb.SyncReport] = []

    async def conversation(client: "ControlClient") -> None:
        if as_json or not stdout().is_terminal:
            lines = stderr() if as_json else stdout()
            before = None
            async for message in _watched(client, sync_id):
                latest[:], report = [message], _report(message)
                for line in words.news(before, report, time.time()):
                    lines.print(line, soft_wrap=True)
                before = report
            return
        with Live(
            console=stdout(),
            transient=True,
            refresh_per_second=4,
            get_renderable=lambda: Text.from_markup(
                words.live_line(_report(latest[0]), time.time()) if latest else "", overflow="fold"
            ),
        ):
            async for message in _watched(client, sync_id):
                latest[:] = [message]
        print_lines([words.outcome(_report(latest[0]))])

    try:
        call_daemon(daemon, conversation)
    except KeyboardInterrupt:
        stderr().print("\nit goes on by itself; end it with [bold]orchestrrl sync abort[/bold]", soft_wrap=True)
        raise typer.Exit(EXIT_LEFT) from None
    report = _report(latest[0])
    if as_json:
        print_json(plain(latest[0]))
    if not words.is_well(report):
        fail(f"version {report.version} is {report.state}: {report.detail or report.code or 'no reason given'}")


def abort(
    sync_id: SyncArgument = "", reason: Reason = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False
) -> None:
    """End a sync that is not committed: every engine keeps the version that it has, or gets it back.

    It returns at once; `orchestrrl sync watch` tells when it is over.

    Example: `orchestrrl sync abort --reason "the loss is not a number"`
    """
    order = pb.AbortSyncRequest(sync_id=sync_id, reason=reason)
    _show_outcome(daemon, lambda client: client.call(client.weights.AbortSync, order), "called off", as_json)


def install(
    sync_id: SyncArgument = "", reason: Reason = "", daemon: DaemonOption = DEFAULT_TARGET, as_json: JsonFlag = False
) -> None:
    """Install now what is on every host and waits for the pause barrier to be closed (`install: next_pause`).

    Example: `orchestrrl sync install --reason "nobody generates for a while"`
    """
    order = pb.InstallSyncRequest(sync_id=sync_id, reason=reason)
    _show_outcome(daemon, lambda client: client.call(client.weights.InstallSync, order), "to be installed now", as_json)


# --- asking


async def _profiled(client: "ControlClient", version: int | None, last: int) -> "list[SyncReport]":
    """With their edges, the newest first."""
    if last == 1:
        return [_report(await client.call(client.weights.GetSync, pb.GetSyncRequest(version=version)))]
    listed = await client.call(client.weights.ListSyncs, pb.ListSyncsRequest(limit=last + UNDER_WAY))
    ids = [each.sync_id for each in listed.syncs if _report(each).over][:last]
    if not ids:
        raise Permanent("no sync is over yet")
    return [_report(await client.call(client.weights.GetSync, pb.GetSyncRequest(sync_id=id))) for id in ids]


async def _watched(client: "ControlClient", sync_id: str) -> "AsyncIterator[pb.SyncReport]":
    """Each as the sync goes on. It outlives the daemon's being away: then its next life is asked."""
    import asyncio

    message: pb.SyncReport | None = None
    away = False
    while message is None or not _report(message).over:
        try:
            async for message in client.watch(client.weights.WatchSync, pb.GetSyncRequest(sync_id=sync_id)):
                away, sync_id = False, message.sync_id
                yield message
        except (Retryable, OutcomeUnknown):
            if message is None:
                raise
        if message is None:
            raise OutcomeUnknown(f"the daemon at {client.address} ended the call without an answer")
        if not _report(message).over:
            if not away:
                stderr().print("the daemon is away: the sync goes on, or back, once it is there again", soft_wrap=True)
            away = True
            await asyncio.sleep(POLL_EVERY_S)


def _report(message: "pb.SyncReport") -> "SyncReport":
    from orchestrrl.rpc.codecs.weights import report_from_pb

    try:
        return report_from_pb(message)
    except ValueError as error:
        raise Permanent(f"the daemon is newer than this command: {error}") from None


def _status(message: "pb.WeightsStatus") -> "WeightsStatus":
    from orchestrrl.rpc.codecs.weights import status_from_pb

    with reporting_errors():
        try:
            return status_from_pb(message)
        except ValueError as error:
            raise Permanent(f"the daemon is newer than this command: {error}") from None


def _show_outcome(daemon: str, conversation: Any, what: str, as_json: bool) -> None:
    message = call_daemon(daemon, conversation)
    if as_json:
        print_json(plain(message))
        return
    report = _report(message)
    watch = "; watch it with [bold]orchestrrl sync watch[/bold]"
    print_lines([words.outcome(report) if report.over else f"{words.named(report)} is {what}{watch}"])


# --- showing


def _show_profile(profile: "SyncProfile") -> None:
    print_lines(words.profile_lines(profile))
    if not profile.rows:
        return
    print_table("Phases", words.PHASE_COLUMNS, words.phase_rows(profile), left=words.WORDY)
    if profile.report.slowest:
        print_table(
            "", words.EDGE_COLUMNS, words.edge_rows(profile.report.slowest[: words.EDGES_SHOWN]), left={"phase"}
        )
    _print_engines(profile.report)
    print_lines(words.advice_lines([profile]))


def _show_last(profiles: "list[SyncProfile]") -> None:
    title = f"Phases of {len(profiles)} versions" if len(profiles) > 1 else "Phases"
    print_table(title, words.LAST_COLUMNS, words.last_rows(profiles), left=words.WORDY)
    print_lines(words.advice_lines(profiles))


def _print_engines(report: "SyncReport") -> None:
    if report.engines:
        rows = words.engine_rows(report.engines)
        print_table("Engines", words.ENGINE_COLUMNS, rows, left=words.WORDY, optional=("remark",))


def _profile_json(profile: "SyncProfile") -> dict[str, Any]:
    from orchestrrl.weights.controller.advice import advice

    report = profile.report
    return {
        "sync_id": report.id,
        "version": report.version,
        "state": report.state,
        "code": report.code,
        "whole_s": profile.whole_s,
        "transfer_s": profile.transfer_s,
        "still_s": profile.still_s,
        "unnamed_s": profile.unnamed_s,
        "dominating": profile.dominating,
        "phases": [asdict(row) for row in profile.rows],
        "critical_path": [asdict(stretch) for stretch in profile.path],
        "bytes": report.bytes,
        "carried_bytes": report.carried_bytes,
        "carried_gbps": profile.carried_gbps,
        "estimate_s": report.estimate_s,
        "lower_bound_s": report.lower_bound_s,
        "naive_s": report.naive_s,
        "over_estimate": profile.over_estimate,
        "over_bound": profile.over_bound,
        "mended_edges": report.mended_edges,
        "slowest": [{**asdict(edge), "gbps": edge.gbps} for edge in report.slowest],
        "engines": [asdict(engine) for engine in report.engines],
        "notes": report.notes,
        "advice": [asdict(each) for each in advice(profile)],
    }


def _draw(profiles: "list[SyncProfile]", target: Path) -> None:
    from orchestrrl.weights.controller.pictures import draw

    try:
        draw(profiles, target)
    except (OSError, ValueError) as error:
        with reporting_errors():
            raise ProblemFaults([f"--picture: {error}, got {str(target)!r}"]) from None


def register(app: typer.Typer) -> None:
    sync = group(app, "sync")
    for command in (status, history, profile, watch, abort, install):
        sync.command(command.__name__)(command)
