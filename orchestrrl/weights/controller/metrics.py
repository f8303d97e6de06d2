"""Prometheus metrics of weight syncs: the fleet's version, sync outcomes, and the time of each phase."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from orchestrrl.core.metrics import labelled_counter, labelled_gauge
from orchestrrl.weights.controller.controller import WeightSync
from orchestrrl.weights.controller.profile import profile
from orchestrrl.weights.controller.reports import SyncPhase, SyncReport, SyncState, WeightsStatus
from orchestrrl.weights.model import PeerRole

LOOKED_AT = 256  # newest syncs read per scrape: more than can end between two scrapes


class SyncMetrics:
    """Metrics of weight syncs. Each sync is counted once, when it is over. Syncs that ended before `since_s`, the start
    of the daemon, are not counted."""

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._counted: set[str] = set()
        self._outcomes: Counter[tuple[SyncState, str]] = Counter()
        self._ran: Counter[SyncPhase] = Counter()
        self._ran_s: dict[SyncPhase, float] = dict.fromkeys(SyncPhase, 0.0)
        self._whole_s = self._still_s = 0.0
        self._done = self._carried_bytes = self._mended = 0

    def collect(self, syncs: WeightSync) -> Iterator[Metric]:
        status = syncs.status()
        over = [report for report in syncs.history(LOOKED_AT) if report.over and (report.ended_s or 0) >= self._since_s]
        for report in over:
            if report.id not in self._counted:
                self._count(report)
        self._counted = {report.id for report in over}
        yield from self._now(status)
        yield from self._totals()
        if over:
            yield _against(over[0])

    def _now(self, status: WeightsStatus) -> Iterator[Metric]:
        if status.committed is not None:
            help_text = "The committed version of the fleet; absent until the first commit."
            yield GaugeMetricFamily("orchestrrl_sync_committed_version", help_text, status.committed)
        help_text = "1 while a weight sync is running, else 0."
        running = status.sync is not None and not status.sync.over
        yield GaugeMetricFamily("orchestrrl_sync_running", help_text, float(running))
        help_text = "Engines that do not have the fleet's version and get no requests until they do."
        yield GaugeMetricFamily("orchestrrl_sync_quarantined_engines", help_text, len(status.quarantined))
        attached = Counter(peer.role for peer in status.peers if peer.attached)
        help_text = "Attached weight peers, by role."
        by_role = [(role, attached[role]) for role in PeerRole]
        yield labelled_gauge("orchestrrl_sync_peers_attached", help_text, "role", by_role)

    def _totals(self) -> Iterator[Metric]:
        yield labelled_counter(
            "orchestrrl_syncs",
            "Weight syncs that ended since the daemon started, by state and reason; aborted: the fleet keeps the "
            "previous version; superseded: a newer version was published before this one was installed.",
            ("state", "reason"),
            sorted(self._outcomes.items()),
        )
        help_text = "Seconds per phase of ended weight syncs, summed over attempts."
        phases = SummaryMetricFamily("orchestrrl_sync_phase_seconds", help_text, labels=["phase"])
        for phase in SyncPhase:
            phases.add_metric([phase], self._ran[phase], self._ran_s[phase])
        yield phases
        help_text = "Seconds from the start of the trainer's offload to the resumption of requests, of completed syncs."
        yield SummaryMetricFamily("orchestrrl_sync_seconds", help_text, self._done, self._whole_s)
        help_text = "Seconds for which requests were paused for weight syncs."
        yield CounterMetricFamily("orchestrrl_sync_still_seconds", help_text, self._still_s)
        help_text = "Bytes of weights sent between peers."
        yield CounterMetricFamily("orchestrrl_sync_carried_bytes", help_text, self._carried_bytes)
        help_text = "Edges that broke during transfers and were replaced."
        yield CounterMetricFamily("orchestrrl_sync_mended_edges", help_text, self._mended)

    def _count(self, report: SyncReport) -> None:
        took = profile(report)
        self._outcomes[report.state, report.code] += 1
        for row in took.rows:
            self._ran[row.phase] += 1
            self._ran_s[row.phase] += row.seconds
        if report.state is SyncState.DONE:
            self._done += 1
            self._whole_s += took.whole_s
        self._still_s += took.still_s
        self._carried_bytes += report.arrived_bytes
        self._mended += report.mended_edges


def _against(report: SyncReport) -> Metric:
    took = profile(report)
    return labelled_gauge(
        "orchestrrl_sync_transfer_ratio",
        "Ratio of the last transfer's time to the plan's estimate and to the lower bound of any plan; absent if the "
        "transfer was not completed.",
        "of",
        [("estimate", took.over_estimate), ("bound", took.over_bound)],
    )
