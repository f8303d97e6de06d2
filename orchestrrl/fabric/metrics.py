"""What Prometheus is told of the fabric: what became of periods, circuits that are up, and what changes take."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orchestrrl.core.defects import ACTING
from orchestrrl.core.pause_registry import Part

if TYPE_CHECKING:
    from orchestrrl.daemon.control_plane import ControlPlane
    from orchestrrl.fabric.coordinator import Coordinator


def pause_metrics(paused: Iterable[Part]) -> Metric:
    there = set(paused)
    family = GaugeMetricFamily("orchestrrl_paused", "1 while an operator has paused this part.", labels=["part"])
    for part in Part:
        family.add_metric([part], float(part in there))
    return family


def defect_metrics(plane: "ControlPlane") -> Metric:
    parts = {
        "circuits": plane.circuits,
        "fabric": plane.fabric,
        "generation": plane.gen_circuits,
        "routes": plane.routing,
        "weights": plane.weights,
    }
    family = CounterMetricFamily(
        "orchestrrl_defects",
        "Exceptions that ended one turn of a loop or task, or one call. Its work was set aside; the log has their "
        "tracebacks.",
        labels=["part"],
    )
    for name, part in parts.items():
        if part is not None:
            family.add_metric([name], part.defects)
    for name in sorted({*ACTING, *plane.defects.counts}):
        family.add_metric([name], plane.defects.counts[name])
    return family


def fabric_metrics(fabric: "Coordinator") -> Iterator[Metric]:
    periods = CounterMetricFamily(
        "orchestrrl_fabric_periods",
        "Announced periods that are over since the daemon started, by state and reason.",
        labels=["state", "reason"],
    )
    for (state, code), count in sorted(fabric.counts.items()):
        periods.add_metric([state, code], count)
    yield periods
    glance = fabric.glance
    circuits = GaugeMetricFamily(
        "orchestrrl_fabric_circuits", "Cross-connects that are up between fibres of the site.", labels=["switch"]
    )
    up = Counter(pair.switch for pair in glance.cross_connects if fabric.ends(pair) is not None)
    for switch in fabric.site.switches:
        if switch.id not in glance.unread:
            circuits.add_metric([switch.id], up[switch.id])
    yield circuits
    unread = GaugeMetricFamily(
        "orchestrrl_fabric_switch_unreachable", "1 where the switch did not answer when last asked.", labels=["switch"]
    )
    failed = GaugeMetricFamily(
        "orchestrrl_fabric_failed_ports", "Ports that the switch itself reports as not usable.", labels=["switch"]
    )
    broken = Counter(switch for switch, _ in glance.failures.ports)
    expected = GaugeMetricFamily(
        "orchestrrl_fabric_change_seconds",
        "What a change of the switch is expected to take until packets may use it, margin excluded.",
        labels=["switch"],
    )
    for id, expected_s, _ in fabric.times_of_switches():
        unread.add_metric([id], float(id in glance.unread))
        failed.add_metric([id], broken[id])
        expected.add_metric([id], expected_s)
    yield from (unread, failed, expected)
