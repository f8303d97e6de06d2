"""The view of traced hosts in the daemon."""

from orchestrrl.core.clock import VirtualClock
from orchestrrl.fabric.window_tracker import TracedHost, WindowTracker
from orchestrrl.rpc.codecs.fabric import hosts_to_pb
from planner.fabric.clocks import ClockExchange
from planner.model import Hold


def test_host_detail_omits_jobs_of_other_hosts() -> None:
    """Check that hosts without the job are not listed. An announcement for an unknown job queries every host, and each
    of them reports that it lacks the job."""
    host = TracedHost("node7", jobs={"tiny": frozenset({0, 1})})
    host.clock.add(ClockExchange(0.0, 0.001, 0.002, 0.003))
    host.quiet_reports[""] = (0.0, 0, Hold("unlearnt", "no rank of job '' is traced on this host"))
    hub = WindowTracker(VirtualClock())
    hub.hosts["node7"] = host
    assert [each.detail for each in hosts_to_pb(hub, 0.0)] == [""]

    host.quiet_reports["tiny"] = (0.0, 0, Hold("traffic", "rank 0 has a collective in flight"))
    assert [each.detail for each in hosts_to_pb(hub, 0.0)] == ["tiny: rank 0 has a collective in flight"]
