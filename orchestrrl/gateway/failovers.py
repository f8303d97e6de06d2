"""Count requests that continued after their engine failed, for reports to the daemon and Prometheus metrics."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from orchestrrl.core.metrics import labelled_counter
from orchestrrl.fleet.reports import EngineFailovers, FailoverCounts
from planner.model import EngineId

UNREPORTED_KEPT = 2048


class FailoverCounter:
    """Failover counts per failed engine. A failover is counted when the request continues on another engine."""

    def __init__(self) -> None:
        self.totals: dict[EngineId, FailoverCounts] = {}
        # By sequence number of the first report that contains them, and by engine; oldest first.
        self._unacknowledged: dict[tuple[int, EngineId], EngineFailovers] = {}
        self._reported = 0  # sequence number of the newest report

    def count(self, engine: EngineId, recomputed_tokens: int | None, now_s: float) -> None:
        """Count one failover from the failed engine `engine`. `recomputed_tokens` is the number of context tokens that
        the next engine prefilled again. It is None if the failed engine had not computed any part of the request."""
        one = FailoverCounts(1, int(recomputed_tokens is not None), recomputed_tokens or 0)
        self.totals[engine] = self.totals.get(engine, FailoverCounts()) + one
        sequence = self._reported + 1
        before = self._unacknowledged.get((sequence, engine))
        counts = one if before is None else before.counts + one
        self._unacknowledged[sequence, engine] = EngineFailovers(engine, sequence, now_s, counts)
        if len(self._unacknowledged) > UNREPORTED_KEPT:
            del self._unacknowledged[next(iter(self._unacknowledged))]

    def report(self, sequence: int) -> tuple[EngineFailovers, ...]:
        """Return the unacknowledged counts for the report with sequence number `sequence`. The number must be one
        higher than in the previous call."""
        self._reported = sequence
        return tuple(self._unacknowledged.values())

    def acknowledge(self, sequence: int) -> None:
        """Forget the counts of all reports up to sequence number `sequence`. A number that was never sent is
        ignored."""
        if sequence <= self._reported:
            left = {key: each for key, each in self._unacknowledged.items() if each.sequence > sequence}
            self._unacknowledged = left


def failover_metrics(prefix: str, totals: Mapping[EngineId, FailoverCounts]) -> Iterator[Metric]:
    """Yield the failover metrics of a gateway or the daemon. The name of each metric begins with `prefix`. `totals`
    maps each failed engine to its counts."""
    counts = sorted(totals.items())
    help_text = "Requests that continued after this engine failed, stalled or aborted them."
    yield labelled_counter(f"{prefix}_failovers", help_text, "engine", [(id, each.failovers) for id, each in counts])
    help_text, recomputed = "Failovers of requests that this engine had partly run.", "failover_requests_recomputed"
    requests = [(id, each.requests_recomputed) for id, each in counts]
    yield labelled_counter(f"{prefix}_{recomputed}", help_text, "engine", requests)
    help_text = "Context tokens prefilled again after failovers from this engine."
    tokens = [(id, each.tokens_recomputed) for id, each in counts]
    yield labelled_counter(f"{prefix}_failover_recomputed_tokens", help_text, "engine", tokens)
