"""Prometheus metrics as one expression each."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Labels = str | tuple[str, ...]  # one name or value, or several
MetricValue = float | None | Mapping[Any, float | None]


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


class MetricFamilies(list[Metric]):
    """Metrics that are collected together; each has the `prefix` before its name and its labels' names in braces after
    it. A value is one number, or several by the values of the labels; what is None is absent."""

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
