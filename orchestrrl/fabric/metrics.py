"""What Prometheus is told of the fabric: what became of periods, circuits that are up, and what changes take."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from orchestrrl.fabric.coordinator import CircuitCoordinator


def fabric_metrics(fabric: "CircuitCoordinator") -> Iterator[Metric]:
    periods = CounterMetricFamily(
        "orchestrrl_fabric_periods",
        "Announced periods that are over since the daemon started, by state and reason.",
        labels=["state", "reason"],
    )
    for (state, code), count in sorted(fabric.counts.items()):
        periods.add_metric([state, code], count)
    yield periods
    site_reading = fabric.site_reading
    circuits = GaugeMetricFamily(
        "orchestrrl_fabric_circuits", "Cross-connects that are up between fibres of the site.", labels=["switch"]
    )
    up = Counter(pair.switch for pair in site_reading.cross_connects if fabric.ends(pair) is not None)
    for switch in fabric.site.switches:
        if switch.id not in site_reading.unread:
            circuits.add_metric([switch.id], up[switch.id])
    yield circuits
    unread = GaugeMetricFamily(
        "orchestrrl_fabric_switch_unreachable", "1 where the switch did not answer when last asked.", labels=["switch"]
    )
    failed = GaugeMetricFamily(
        "orchestrrl_fabric_failed_ports", "Ports that the switch itself reports as not usable.", labels=["switch"]
    )
    broken = Counter(switch for switch, _ in site_reading.failures.ports)
    expected = GaugeMetricFamily(
        "orchestrrl_fabric_change_seconds",
        "What a change of the switch is expected to take until packets may use it, margin excluded.",
        labels=["switch"],
    )
    for id, expected_s, _ in fabric.times_of_switches():
        unread.add_metric([id], float(id in site_reading.unread))
        failed.add_metric([id], broken[id])
        expected.add_metric([id], expected_s)
    yield from (unread, failed, expected)
