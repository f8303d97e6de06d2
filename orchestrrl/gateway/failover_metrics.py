"""Failovers as Prometheus metrics, on the gateway's page and on the daemon's."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from orchestrrl.core.metrics import labelled_counter
from orchestrrl.fleet.reports import FailoverCounts
from planner.model import EngineId


def failover_metrics(prefix: str, totals: Mapping[EngineId, FailoverCounts]) -> Iterator[Metric]:
    """`totals`: by the engine that failed."""
    counts = sorted(totals.items())
    help_text = "Requests that went on after this engine failed, hung or gave them up."
    yield labelled_counter(f"{prefix}_failovers", help_text, "engine", [(id, each.failovers) for id, each in counts])
    help_text, recomputed = "Of these, requests that this engine had computed in part.", "failover_requests_recomputed"
    requests = [(id, each.requests_recomputed) for id, each in counts]
    yield labelled_counter(f"{prefix}_{recomputed}", help_text, "engine", requests)
    help_text = "Tokens of their contexts, prefilled again where they went on."
    tokens = [(id, each.tokens_recomputed) for id, each in counts]
    yield labelled_counter(f"{prefix}_failover_recomputed_tokens", help_text, "engine", tokens)
