"""Convert the fabric's state and reports to messages. Also convert the orders to hosts that report slack windows."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrrl.fabric.periods import CommitReport, FabricControl, PeriodReport
from orchestrrl.fabric.switch_reader import SiteReading
from orchestrrl.fabric.verification import VerificationReport
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
from orchestrrl.rpc.codec import LOCAL, Codec, OneOf, rows_to_pb
from orchestrrl.rpc.pb import fabric_pb2 as pb
from planner.fabric.cables import CablingFault
from planner.fabric.model import Pair
from planner.fabric.slack import RemainingQuiet
from planner.model import Hold

if TYPE_CHECKING:
    from orchestrrl.fabric.coordinator import CircuitCoordinator
    from orchestrrl.fabric.packet_routing import FabricRouting

PAIRS_TOLD = 256  # pairs of ToRs: those of a large site exceed the size of a message

PERIOD = Codec(PeriodReport, pb.PeriodReport, commits=Codec(CommitReport, pb.CommitReport, switch_times=LOCAL))
CONTROL = Codec(FabricControl, pb.FabricControl)
VERIFICATION = Codec(
    VerificationReport,
    pb.FabricVerification,
    faults=Codec(CablingFault, pb.FabricFault, port=LOCAL),
    circuits="cross_connects",
)
QUIET = Codec(RemainingQuiet, pb.Quiet, beside="rank armed told_s job", opened_s="since_s")
_ORDERS = OneOf(
    "order",
    arm=Codec(WatchWindows, pb.Arm),
    disarm=Codec(StopWatching, pb.Disarm),
    ping=Codec(ClockPing, pb.Ping),
    summarise=Codec(RequestSummary, pb.Summarise),
)


def order_to_pb(order: Order) -> pb.TraceOrder:
    return pb.TraceOrder(**_ORDERS.to_fields(order))


def jobs_from_pb(hello: pb.TraceHello) -> Jobs:
    return {each.job: frozenset(each.ranks) for each in hello.jobs}


def fabric_to_pb(fabric: "CircuitCoordinator", limit: int, routing: "FabricRouting | None" = None) -> pb.FabricStatus:
    pinned = fabric.overrides.pinned
    return pb.FabricStatus(
        configured=True,
        control=CONTROL.to_pb(fabric.overrides.control),
        period=fabric.period,
        periods=map(PERIOD.to_pb, fabric.reports(limit)),
        counts=rows_to_pb(pb.PeriodCount, ((*key, count) for key, count in sorted(fabric.counts.items()))),
        masked=[*fabric.overrides.masked, *_broken(fabric.site_reading)],
        circuits=rows_to_pb(
            pb.CircuitCount, ((pod, *ends, count) for (pod, ends), count in sorted(_circuits_of(fabric).items()))
        ),
        switch_times=rows_to_pb(pb.SwitchTime, fabric.times_of_switches()),
        routes=routes_to_pb(routing),
        cross_connects=rows_to_pb(
            pb.CrossConnectOf,
            (
                (pair.switch, pair.port_a, pair.port_b, *(fabric.site.cabling.ends(pair) or ("", "")), pair in pinned)
                for pair in sorted(fabric.site_reading.cross_connects)
            ),
        ),
    )


def _circuits_of(fabric: "CircuitCoordinator") -> Mapping[tuple[str, Pair], int]:
    """Return the number of circuits, keyed by PoD and pair of endpoints. For core circuits, the PoD is an empty
    string."""
    found: Counter[tuple[str, Pair]] = Counter()
    for pair in fabric.site_reading.cross_connects:
        ends = fabric.site.cabling.ends(pair)
        if ends is not None:
            found[fabric.site.switch[pair.switch].pod or "", ends] += 1
    return found


def _broken(site_reading: SiteReading) -> list[str]:
    """Return a text for each failed port that a switch reports, and for each switch that does not respond."""
    ports = sorted(site_reading.failures.ports)
    told = [f"port {switch}:{port} (reported by the switch)" for switch, port in ports]
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
        left_out=rows_to_pb(pb.RoutesAmiss, ((str(link), why) for link, why in sorted(routed.left_out.items()))),
        failed=rows_to_pb(pb.RoutesAmiss, sorted(routed.failed.items())),
        unreachable=rows_to_pb(pb.TorPair, routed.unreachable[:PAIRS_TOLD]),
        on_packet_side=rows_to_pb(pb.TorPair, routed.on_packet_side[:PAIRS_TOLD]),
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
        # windows are also requested for jobs that the host does not have
        if isinstance(word, Hold) and job in host.jobs
    ]
    return pb.HostTrace(
        host=host.name,
        jobs=rows_to_pb(pb.JobRanks, ((job, sorted(ranks)) for job, ranks in sorted(host.jobs.items()))),
        attached=host.stream is not None,
        offset_s=0.0 if offset is None else offset.offset_s,
        bound_s=0.0 if offset is None else offset.bound_s,
        detail="; ".join(words) if offset is not None else "the offset of its clock is unknown",
    )
