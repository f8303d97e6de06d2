"""Prometheus metrics of the fabric: the outcomes of periods, the circuits that are up, and the durations of changes."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from orchestrrl.core.metrics import labelled_counter, labelled_gauge

if TYPE_CHECKING:
    from orchestrrl.fabric.coordinator import CircuitCoordinator


def fabric_metrics(fabric: "CircuitCoordinator") -> Iterator[Metric]:
    yield labelled_counter(
        "orchestrrl_fabric_periods",
        "Announced periods that ended since the daemon started, by state and reason.",
        ("state", "reason"),
        sorted(fabric.counts.items()),
    )
    site_reading = fabric.site_reading
    up = Counter(pair.switch for pair in site_reading.of_site)
    help_text = "Cross-connects that are up between fibres of the site."
    read = [(each.id, up[each.id]) for each in fabric.site.switches if each.id not in site_reading.unread]
    yield labelled_gauge("orchestrrl_fabric_circuits", help_text, "switch", read)
    times = fabric.times_of_switches()
    help_text = "1 if the switch did not answer the last poll, otherwise 0."
    unread = [(id, float(id in site_reading.unread)) for id, _, _ in times]
    yield labelled_gauge("orchestrrl_fabric_switch_unreachable", help_text, "switch", unread)
    help_text = "Ports that the switch reports as unusable."
    failed = Counter(switch for switch, _ in site_reading.failures.ports)
    yield labelled_gauge(
        "orchestrrl_fabric_failed_ports", help_text, "switch", [(id, failed[id]) for id, _, _ in times]
    )
    help_text = "Expected seconds of a circuit change on the switch until packets may use it, without margin."
    expected = [(id, expected_s) for id, expected_s, _ in times]
    yield labelled_gauge("orchestrrl_fabric_change_seconds", help_text, "switch", expected)
