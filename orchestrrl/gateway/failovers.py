"""Requests that went on after their engine failed: counted, reported to the daemon, and as Prometheus metrics."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from orchestrrl.core.metrics import labelled_counter
from orchestrrl.fleet.reports import EngineFailovers, FailoverCounts
from planner.model import EngineId

UNREPORTED_KEPT = 2048


class FailoverCounter:
    """Counted when the request goes on, by the engine that failed."""

    def __init__(self) -> None:
        self.totals: dict[EngineId, FailoverCounts] = {}
        # By the sequence of the first report that has them, and by engine; the oldest first.
        self._unacknowledged: dict[tuple[int, EngineId], EngineFailovers] = {}
        self._reported = 0  # the newest report's sequence

    def count(self, engine: EngineId, recomputed_tokens: int | None, now_s: float) -> None:
        """`recomputed_tokens`: the context that the next engine had to prefill again; None: the failed one had computed
        nothing of the request."""
        one = FailoverCounts(1, int(recomputed_tokens is not None), recomputed_tokens or 0)
        self.totals[engine] = self.totals.get(engine, FailoverCounts()) + one
        sequence = self._reported + 1
        before = self._unacknowledged.get((sequence, engine))
        counts = one if before is None else before.counts + one
        self._unacknowledged[sequence, engine] = EngineFailovers(engine, sequence, now_s, counts)
        if len(self._unacknowledged) > UNREPORTED_KEPT:
            del self._unacknowledged[next(iter(self._unacknowledged))]

    def report(self, sequence: int) -> tuple[EngineFailovers, ...]:
        """What no acknowledged report had, for the report with this sequence number, which follows the last one's."""
        self._reported = sequence
        return tuple(self._unacknowledged.values())

    def acknowledge(self, sequence: int) -> None:
        """The daemon holds everything up to this report. A number that was never sent is ignored."""
        if sequence <= self._reported:
            left = {key: each for key, each in self._unacknowledged.items() if each.sequence > sequence}
            self._unacknowledged = left


def failover_metrics(prefix: str, totals: Mapping[EngineId, FailoverCounts]) -> Iterator[Metric]:
    """On the page of the gateway and of the daemon. `totals`: by the engine that failed."""
    counts = sorted(totals.items())
    help_text = "Requests that went on after this engine failed, hung or gave them up."
    yield labelled_counter(f"{prefix}_failovers", help_text, "engine", [(id, each.failovers) for id, each in counts])
    help_text, recomputed = "Of these, requests that this engine had computed in part.", "failover_requests_recomputed"
    requests = [(id, each.requests_recomputed) for id, each in counts]
    yield labelled_counter(f"{prefix}_{recomputed}", help_text, "engine", requests)
    help_text = "Tokens of their contexts, prefilled again where they went on."
    tokens = [(id, each.tokens_recomputed) for id, each in counts]
    yield labelled_counter(f"{prefix}_failover_recomputed_tokens", help_text, "engine", tokens)
