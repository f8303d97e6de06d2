"""Requests that went on after their engine failed: counted, reported to the daemon, and as Prometheus metrics."""

from collections import deque
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
        self._pending: dict[EngineId, tuple[FailoverCounts, float]] = {}  # in no report yet
        self._unacknowledged: deque[EngineFailovers] = deque(maxlen=UNREPORTED_KEPT)
        self._reported = 0  # the newest report's sequence

    def count(self, engine: EngineId, recomputed_tokens: int | None, now_s: float) -> None:
        """`recomputed_tokens`: the context that the next engine had to prefill again; None: the failed one had computed
        nothing of the request."""
        one = FailoverCounts(1, recomputed_tokens is not None, recomputed_tokens or 0)
        self.totals[engine] = self.totals.get(engine, FailoverCounts()) + one
        before, _ = self._pending.get(engine, (FailoverCounts(), 0.0))
        self._pending[engine] = (before + one, now_s)

    def report(self, sequence: int) -> tuple[EngineFailovers, ...]:
        """What no acknowledged report had, for the report with this sequence number."""
        self._reported = sequence
        for engine, (counts, at_s) in sorted(self._pending.items()):
            self._unacknowledged.append(EngineFailovers(engine, sequence, at_s, counts))
        self._pending.clear()
        return tuple(self._unacknowledged)

    def acknowledge(self, sequence: int) -> None:
        """The daemon holds everything up to this report. A number that was never sent is ignored."""
        if sequence > self._reported:
            return
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self._unacknowledged.popleft()


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
