"""Helpers that build a Prometheus metric family in a single expression."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Labels = str | tuple[str, ...]  # one name or value, or several
MetricValue = float | None | Mapping[Any, float | None]


def labelled_gauge(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float | None]]
) -> GaugeMetricFamily:
    """Return a gauge with one sample per (label values, value) pair. Pairs with value None are omitted."""
    return _filled(GaugeMetricFamily(name, text, labels=_several(labels)), values)


def labelled_counter(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float | None]]
) -> CounterMetricFamily:
    """Return a counter with one sample per (label values, value) pair. Pairs with value None are omitted."""
    return _filled(CounterMetricFamily(name, text, labels=_several(labels)), values)


def _filled(family: Family, values: Iterable[tuple[Labels, float | None]]) -> Family:
    for labels, value in values:
        if value is not None:
            family.add_metric(_several(labels), value)
    return family


def _several(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels


class MetricFamilies(list[Metric]):
    """A list of metrics that are collected together. `prefix` is prepended to every name. A name may end with the
    metric's label names in braces, for example `requests{state}`. A value is one number or, for a metric with labels, a
    mapping from label values to numbers. Metrics and samples with value None are omitted."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def gauge(self, name: str, text: str, value: MetricValue) -> None:
        self._add(GaugeMetricFamily, name, text, value)

    def counter(self, name: str, text: str, value: MetricValue) -> None:
        self._add(CounterMetricFamily, name, text, value)

    def _add(self, family: type[Family], name: str, text: str, value: MetricValue) -> None:
        name, _, labels = name.removesuffix("}").partition("{")
        if isinstance(value, Mapping):
            made = family(self._prefix + name, text, labels=labels.split(","))
            self.append(_filled(made, value.items()))
        elif value is not None:
            self.append(family(self._prefix + name, text, value))
