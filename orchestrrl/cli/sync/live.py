"""`orchestrrl sync status|history|profile|watch|abort|install`: show and control the weight syncs of a daemon."""

import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import JsonFlag, Reason, daemon_command
from orchestrrl.cli.lazy import ControlClient
from orchestrrl.cli.lazy import sync_text as words
from orchestrrl.cli.lazy import weights_pb2 as pb
from orchestrrl.cli.output import Output, View, fields, raise_faults, stdout, table
from orchestrrl.cli.progress import persistently, until_over
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    from orchestrrl.weights.controller.profile import SyncProfile
    from orchestrrl.weights.controller.reports import SyncReport, WeightsStatus

SHOWN = 20
LARGEST = 2**64 - 1
MOST_PROFILED = 1000
UNDER_WAY = 8  # maximum number of syncs that have not ended
AWAY = "the daemon is unreachable: the sync continues, or is rolled back, when it is running again"

SyncArgument = Annotated[str, typer.Argument(metavar="SYNC", help="The sync's id. Default: the running one.")]


@daemon_command
async def status(client: ControlClient) -> Output:
    """Show the fleet's weight version, the running sync with its stragglers, quarantined engines, and all peers.

    Example: `orchestrrl sync status`
    """
    message = await client.call(client.weights.GetWeights, pb.GetWeightsRequest())
    return Output(plain(message), _status_view(message))


def _status_view(message: "pb.WeightsStatus") -> View:
    seen: WeightsStatus = _read("STATUS", message)
    yield from words.status_lines(seen, time.time())
    if seen.sync is not None and not seen.sync.over and seen.sync.engines:
        yield table("Engines", words.ENGINE_COLUMNS, seen.sync.engines)
    yield table("Peers", words.PEER_COLUMNS, seen.peers) if seen.peers else words.NO_PEERS


@daemon_command
async def history(
    client: ControlClient,
    limit: Annotated[int, typer.Option(min=1, max=MOST_PROFILED, help="Maximum number of versions.")] = SHOWN,
) -> Output:
    """List the latest weight versions with their outcomes and times, and compare transfers with the plan's estimate.

    Example: `orchestrrl sync history --limit 50`
    """
    listed = await client.call(client.weights.ListSyncs, pb.ListSyncsRequest(limit=limit))
    return Output(plain(listed), _history_view(listed))


def _history_view(listed: "pb.ListSyncsResponse") -> View:
    reports = [_report(each) for each in listed.syncs]
    if not reports:
        yield words.NONE_YET
        return
    yield words.history_table(reports, time.time())
    yield from (words.outcome(report) for report in reports if report.over and not words.is_well(report))


@daemon_command
async def profile(
    client: ControlClient,
    version: Annotated[
        int | None, typer.Argument(metavar="VERSION", min=0, max=LARGEST, help="The version. Default: the latest.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST_PROFILED, help="Maximum number of ended syncs.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the phases over time to a .png, .svg or .pdf file.")
    ] = None,
) -> Output:
    """Show the time that each phase of a weight sync took, and advice to reduce the total time.

    The share of a phase is its part of the critical path, which extends from the first step of the sync in the trainer
    until requests run with the new version. Taking circuits down, and the wait for the pause barrier to close, are off
    the critical path. The times of the transfer and of its edges are compared with the plan's estimate and with a lower
    bound for any plan.

    Example: `orchestrrl sync profile 12`

    Example: `orchestrrl sync profile --limit 10 --plot syncs.png`
    """
    from orchestrrl.weights.controller.profile import profile as profile_of

    if version is not None and limit > 1:
        raise_faults([f"--limit: cannot be combined with VERSION, got {limit}"])
    profiles = [profile_of(report, time.time()) for report in await _profiled(client, version, limit)]
    if plot is not None:
        _draw(profiles, plot)
    documents = [_profile_json(each) for each in profiles]
    wrote = [] if plot is None else [f"wrote {escape(str(plot))}"]
    if limit == 1:
        return Output(documents[0], [*_profile_view(profiles[0]), *wrote])
    title = f"Phases of {len(profiles)} versions" if len(profiles) > 1 else "Phases"
    lines = [*words.advice_lines(profiles), *wrote]
    return Output({"profiles": documents}, [words.phases_table(title, profiles), *lines])


@daemon_command
async def watch(client: ControlClient, sync_id: SyncArgument = "", as_json: JsonFlag = False) -> Output:
    """Follow a sync until it ends. Ctrl-C leaves the sync running.

    The exit status is 0 if every engine has the version. It is 1 if the fleet has the previous version, if a newer
    version superseded this version, or if engines are quarantined.

    Example: `orchestrrl sync watch`
    """

    from orchestrrl.rpc.codecs.weights import report_to_pb

    async def fetch(latest: "SyncReport | None") -> "AsyncIterator[SyncReport]":
        request = pb.GetSyncRequest(sync_id=sync_id if latest is None else latest.id)
        async for message in client.watch(client.weights.WatchSync, request):
            yield _report(message)

    reports = persistently(fetch, lambda report: report.over, AWAY)
    report = await until_over(reports, words.picture, words.news, lambda _: words.GOES_ON, as_json)
    ended = [words.outcome(report)] if stdout().is_terminal else []  # in a pipe it was already printed
    return Output(plain(report_to_pb(report)), ended, words.failure(report))


@daemon_command
async def abort(client: ControlClient, sync_id: SyncArgument = "", reason: Reason = "") -> Output:
    """Abort a sync that is not committed. Every engine keeps its previous version or is rolled back to that version.

    The command returns immediately. Use `orchestrrl sync watch` to wait for the end of the sync.

    Example: `orchestrrl sync abort --reason "loss is NaN"`
    """
    order = pb.AbortSyncRequest(sync_id=sync_id, reason=reason)
    return _changed(await client.call(client.weights.AbortSync, order), "being aborted")


@daemon_command
async def install(client: ControlClient, sync_id: SyncArgument = "", reason: Reason = "") -> Output:
    """Immediately install a version that is on every host and waits for the next pause (`install: next_pause`).

    Example: `orchestrrl sync install --reason "no rollout is running"`
    """
    order = pb.InstallSyncRequest(sync_id=sync_id, reason=reason)
    return _changed(await client.call(client.weights.InstallSync, order), "being installed")


def _changed(message: "pb.SyncReport", what: str) -> Output:
    report = _report(message)
    watch = "; watch it with [bold]orchestrrl sync watch[/bold]"
    return Output(plain(message), [words.outcome(report) if report.over else f"{words.named(report)} is {what}{watch}"])


async def _profiled(client: ControlClient, version: int | None, last: int) -> "list[SyncReport]":
    """Return the reports of the syncs to profile, newest first. If `last` is 1, return only the report of `version`
    (None: the latest version). Otherwise, return the reports of the latest `last` syncs that have ended."""
    if last == 1:
        return [_report(await client.call(client.weights.GetSync, pb.GetSyncRequest(version=version)))]
    listed = await client.call(client.weights.ListSyncs, pb.ListSyncsRequest(limit=last + UNDER_WAY))
    ids = [each.sync_id for each in listed.syncs if _report(each).over][:last]
    if not ids:
        raise Permanent("no report is available, because no weight sync has ended yet")
    return [_report(await client.call(client.weights.GetSync, pb.GetSyncRequest(sync_id=id))) for id in ids]


def _report(message: "pb.SyncReport") -> "SyncReport":
    report: SyncReport = _read("SYNC", message)
    return report


def _read(codec: str, message: Any) -> Any:
    from orchestrrl.rpc.codecs import weights

    try:
        return getattr(weights, codec).from_pb(message)
    except ValueError as error:
        raise Permanent(f"the report cannot be read, because the daemon is newer than this command: {error}") from None


# --- views


def _profile_view(profile: "SyncProfile") -> View:
    yield from words.profile_lines(profile)
    if not profile.rows:
        return
    yield words.phases_table("Phases", [profile])
    if profile.report.slowest:
        yield table("", words.EDGE_COLUMNS, profile.report.slowest[: words.EDGES_SHOWN])
    if profile.report.engines:
        yield table("Engines", words.ENGINE_COLUMNS, profile.report.engines)
    yield from words.advice_lines([profile])


def _profile_json(profile: "SyncProfile") -> dict[str, Any]:
    from orchestrrl.weights.controller.advice import advice

    report = profile.report
    return {
        **fields(report, "version state code", sync_id="id"),
        **fields(profile, "whole_s transfer_s still_s unnamed_s dominating"),
        "phases": [asdict(row) for row in profile.rows],
        "critical_path": [asdict(stretch) for stretch in profile.path],
        **fields(report, "bytes carried_bytes estimate_s lower_bound_s naive_s mended_edges notes"),
        **fields(profile, "carried_gbps over_estimate over_bound"),
        "slowest": [{**asdict(edge), "gbps": edge.gbps} for edge in report.slowest],
        "engines": [asdict(engine) for engine in report.engines],
        "advice": [asdict(each) for each in advice(profile)],
    }


def _draw(profiles: "list[SyncProfile]", target: Path) -> None:
    from orchestrrl.weights.controller.pictures import draw

    try:
        draw(profiles, target)
    except (OSError, ValueError) as error:
        raise ProblemFaults([f"--plot: cannot write {str(target)!r}: {error}"]) from None
