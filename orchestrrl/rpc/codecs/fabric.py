"""Between the fabric's values and its messages."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrrl.fabric.periods import CommitReport, FabricControl, PeriodReport, PeriodState
from orchestrrl.fabric.switch_reader import SiteReading
from orchestrrl.fabric.window_tracker import (
    ClockPing,
    Jobs,
    Order,
    RequestSummary,
    StopWatching,
    TracedHost,
    WatchWindows,
    WindowTracker,
)
from orchestrrl.rpc.pb import fabric_pb2 as pb
from planner.fabric.intent import Stage
from planner.fabric.model import Pair
from planner.fabric.slack import RemainingQuiet
from planner.model import Hold

if TYPE_CHECKING:
    from orchestrrl.fabric.coordinator import CircuitCoordinator
    from orchestrrl.fabric.packet_routing import FabricRouting

PAIRS_TOLD = 256  # of ToRs: on a large site all of them are more than a message holds


def period_to_pb(report: PeriodReport | None) -> pb.PeriodReport | None:
    if report is None:
        return None
    return pb.PeriodReport(
        id=report.id,
        period=report.period,
        stage=report.stage,
        state=report.state,
        code=report.code,
        detail=report.detail,
        announced_unix_s=report.announced_s,
        ended_unix_s=report.ended_s,
        stages=report.stages,
        stages_done=report.stages_done,
        moves=report.moves,
        completion_s=report.completion_s,
        notes=report.notes,
        commits=[_commit_to_pb(commit) for commit in report.commits],
        job=report.job,
    )


def _commit_to_pb(commit: CommitReport) -> pb.CommitReport:
    return pb.CommitReport(
        window_opened_unix_s=commit.window_opened_s or 0.0,
        window_until_unix_s=commit.window_until_s or 0.0,
        commanded_unix_s=commit.commanded_s,
        usable_unix_s=commit.usable_s,
        needed_s=commit.needed_s,
        moves=commit.moves,
        done=commit.done,
        detail=commit.detail,
        risk=commit.risk,
    )


def period_from_pb(message: pb.PeriodReport) -> PeriodReport:
    """Raises ValueError for a stage or state of a newer daemon."""
    return PeriodReport(
        message.id,
        message.period,
        Stage(message.stage),
        PeriodState(message.state),
        message.announced_unix_s,
        message.code,
        message.detail,
        message.ended_unix_s if message.HasField("ended_unix_s") else None,
        message.stages,
        message.stages_done,
        message.moves,
        message.completion_s,
        tuple(message.notes),
        tuple(_commit_from_pb(commit) for commit in message.commits),
        message.job,
    )


def _commit_from_pb(message: pb.CommitReport) -> CommitReport:
    windowed = message.window_until_unix_s > 0
    return CommitReport(
        message.window_opened_unix_s if windowed else None,
        message.window_until_unix_s if windowed else None,
        message.needed_s,
        message.commanded_unix_s,
        message.usable_unix_s,
        message.moves,
        message.done,
        message.detail,
        risk=message.risk,
    )


def control_of_fabric_to_pb(control: FabricControl) -> pb.FabricControl:
    return pb.FabricControl(
        state=control.state,
        cross_connects=control.cross_connects,
        period=control.period,
        reason=control.reason,
        expires_unix_s=control.expires_s,
        job=control.job,
    )


def fabric_to_pb(fabric: "CircuitCoordinator", limit: int, routing: "FabricRouting | None" = None) -> pb.FabricStatus:
    control = fabric.overrides.control
    pinned = fabric.overrides.pinned
    message = pb.FabricStatus(
        configured=True,
        control=control_of_fabric_to_pb(control),
        period=fabric.period,
        periods=[told for report in fabric.reports(limit) if (told := period_to_pb(report)) is not None],
        counts=[
            pb.PeriodCount(state=state, code=code, count=count)
            for (state, code), count in sorted(fabric.counts.items())
        ],
        masked=[*fabric.overrides.masked, *_broken(fabric.site_reading)],
        circuits=[
            pb.CircuitCount(pod=pod, a=a, b=b, count=count)
            for (pod, (a, b)), count in sorted(_circuits_of(fabric).items())
        ],
        switch_times=[
            pb.SwitchTime(switch_id=switch, usable_s=usable_s, samples=samples)
            for switch, usable_s, samples in fabric.times_of_switches()
        ],
        routes=routes_to_pb(routing),
    )
    for pair in sorted(fabric.site_reading.cross_connects):
        ends = fabric.ends(pair)
        a, b = ends if ends is not None else ("", "")
        message.cross_connects.append(
            pb.CrossConnectOf(
                switch_id=pair.switch, port_a=pair.port_a, port_b=pair.port_b, a=a, b=b, pinned=pair in pinned
            )
        )
    return message


def _circuits_of(fabric: "CircuitCoordinator") -> Mapping[tuple[str, Pair], int]:
    """How many circuits join two endpoints, by PoD; the core's have none."""
    found: Counter[tuple[str, Pair]] = Counter()
    for pair in fabric.site_reading.cross_connects:
        ends = fabric.ends(pair)
        if ends is not None:
            found[fabric.site.switch[pair.switch].pod or "", ends] += 1
    return found


def _broken(site_reading: SiteReading) -> list[str]:
    """What switches report of themselves."""
    ports = sorted(site_reading.failures.ports)
    told = [f"port {switch}:{port} (by the switch)" for switch, port in ports]
    return [
        *told,
        *(f"switch {switch} (does not answer: {why})" for switch, why in sorted(site_reading.unread.items())),
    ]


def routes_to_pb(routing: "FabricRouting | None") -> pb.RoutesStatus | None:
    if routing is None:
        return None
    routed = routing.routed
    if routed is None:
        return pb.RoutesStatus()
    return pb.RoutesStatus(
        rerouted_unix_s=routed.at_s,
        links=len(routed.links),
        left_out=[pb.RoutesAmiss(what=str(link), why=why) for link, why in sorted(routed.left_out.items())],
        failed=[pb.RoutesAmiss(what=router, why=why) for router, why in sorted(routed.failed.items())],
        unreachable=[pb.TorPair(from_tor=a, to_tor=b) for a, b in routed.unreachable[:PAIRS_TOLD]],
        on_packet_side=[pb.TorPair(from_tor=a, to_tor=b) for a, b in routed.on_packet_side[:PAIRS_TOLD]],
        unreachable_pairs=len(routed.unreachable),
        on_packet_side_pairs=len(routed.on_packet_side),
    )


def hosts_to_pb(hub: WindowTracker, now_s: float) -> list[pb.HostTrace]:
    return [_host_to_pb(host, now_s) for host in hub.current_hosts()]


def _host_to_pb(host: TracedHost, now_s: float) -> pb.HostTrace:
    offset = host.clock.offset(now_s)
    words = [
        f"{job or 'trainer'}: {word.detail}"
        for job, (_, _, word) in host.quiet_reports.items()
        if isinstance(word, Hold) and job in host.jobs  # it is asked for jobs that it has not, too
    ]
    return pb.HostTrace(
        host=host.name,
        jobs=[pb.JobRanks(job=job, ranks=sorted(ranks)) for job, ranks in sorted(host.jobs.items())],
        attached=host.stream is not None,
        offset_s=0.0 if offset is None else offset.offset_s,
        bound_s=0.0 if offset is None else offset.bound_s,
        detail="; ".join(words) if offset is not None else "the offset of its clock is not known",
    )


def jobs_from_pb(hello: pb.TraceHello) -> Jobs:
    return {each.job: frozenset(each.ranks) for each in hello.jobs}


def remaining_from_pb(quiet: pb.Quiet) -> RemainingQuiet:
    """Raises ValueError for what is no time."""
    if not (math.isfinite(quiet.since_s) and math.isfinite(quiet.until_s) and math.isfinite(quiet.told_s)):
        raise ValueError(f"times must be finite, got {quiet.since_s}, {quiet.until_s} and {quiet.told_s}")
    return RemainingQuiet(quiet.position, quiet.since_s, quiet.until_s, quiet.samples, quiet.risk)


def order_to_pb(order: Order) -> pb.TraceOrder:
    match order:
        case WatchWindows():
            arm = pb.Arm(id=order.id, need_s=order.need_s, quantile=order.quantile, job=order.job)
            return pb.TraceOrder(arm=arm)
        case StopWatching():
            return pb.TraceOrder(disarm=pb.Disarm(id=order.id))
        case ClockPing():
            return pb.TraceOrder(ping=pb.Ping(sent_s=order.sent_s))
        case RequestSummary():
            return pb.TraceOrder(summarise=pb.Summarise())
