"""Failovers as Prometheus metrics, on the gateway's page and on the daemon's."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from orchestrrl.fleet.reports import FailoverCounts
from planner.model import EngineId


def failover_metrics(prefix: str, totals: Mapping[EngineId, FailoverCounts]) -> Iterator[Metric]:
    """`totals`: by the engine that failed."""
    failovers = CounterMetricFamily(
        f"{prefix}_failovers",
        "Requests that went on after this engine failed, hung or gave them up.",
        labels=("engine",),
    )
    requests = CounterMetricFamily(
        f"{prefix}_failover_requests_recomputed",
        "Of these, requests that this engine had computed in part.",
        labels=("engine",),
    )
    tokens = CounterMetricFamily(
        f"{prefix}_failover_recomputed_tokens",
        "Tokens of their contexts, prefilled again where they went on.",
        labels=("engine",),
    )
    for engine, counts in sorted(totals.items()):
        failovers.add_metric((engine,), counts.failovers)
        requests.add_metric((engine,), counts.requests_recomputed)
        tokens.add_metric((engine,), counts.tokens_recomputed)
    yield from (failovers, requests, tokens)
