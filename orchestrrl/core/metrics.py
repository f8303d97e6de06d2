"""Prometheus metrics with labels, as one expression each. Values without labels are given to the family itself."""

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Labels = str | tuple[str, ...]  # one name or value, or several


def labelled_gauge(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float | None]]
) -> GaugeMetricFamily:
    """Return a gauge with these values, each after those of its labels; None is left out."""
    return _filled(GaugeMetricFamily(name, text, labels=_several(labels)), values)


def labelled_counter(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float | None]]
) -> CounterMetricFamily:
    """As `labelled_gauge`, for a counter."""
    return _filled(CounterMetricFamily(name, text, labels=_several(labels)), values)


def _filled(family: Family, values: Iterable[tuple[Labels, float | None]]) -> Family:
    for labels, value in values:
        if value is not None:
            family.add_metric(_several(labels), value)
    return family


def _several(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels
