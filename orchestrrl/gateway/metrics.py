"""What a gateway tells Prometheus. Read from the gateway at each scrape, so requests pay nothing for it."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrrl.gateway.failover_metrics import failover_metrics
from orchestrrl.gateway.ledger.versions import OnStale

if TYPE_CHECKING:
    from orchestrrl.gateway.core import Gateway

PREFIX = "orchestrrl_gateway"
LAG_BOUNDS = (0, 1, 2, 4, 8, 16)  # policy versions


class GatewayCollector(Collector):
    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._moves()
        yield from failover_metrics(PREFIX, self._gateway.fleet.failovers.totals)
        yield from self._queue()
        yield from self._engines()
        yield from self._store()
        yield from self._barrier()
        yield from self._versions()

    def _requests(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            f"{PREFIX}_requests",
            "Requests in flight, by engine (empty: held here) and state.",
            labels=("engine", "state"),
        )
        tokens = GaugeMetricFamily(f"{PREFIX}_tokens_held", "Prompt and generated tokens of the requests in flight.")
        counts: Counter[tuple[str, str]] = Counter()
        held = 0
        for record in self._gateway.ledger:
            counts[(record.engine or "", record.state)] += 1
            held += record.context_tokens
        for (engine, state), count in sorted(counts.items()):
            in_flight.add_metric((engine, state), count)
        tokens.add_metric((), held)
        finished = CounterMetricFamily(
            f"{PREFIX}_requests_finished", "Requests that ended, by how they ended.", labels=("finish_reason",)
        )
        for reason, count in sorted(self._gateway.ledger.finished_by_reason.items()):
            finished.add_metric((reason,), count)
        generated = CounterMetricFamily(f"{PREFIX}_generated_tokens", "Tokens of the answers that ended.")
        generated.add_metric((), self._gateway.ledger.generated_total)
        yield from (in_flight, tokens, finished, generated)

    def _moves(self) -> Iterator[Metric]:
        moves = CounterMetricFamily(f"{PREFIX}_moves", "Moves between engines, by outcome.", labels=("outcome",))
        moves.add_metric(("done",), self._gateway.moves_done)
        moves.add_metric(("refused",), self._gateway.moves_refused)
        recomputed = CounterMetricFamily(
            f"{PREFIX}_recomputed_tokens", "Tokens that moves made an engine prefill again."
        )
        recomputed.add_metric((), self._gateway.tokens_recomputed)
        loaded = CounterMetricFamily(f"{PREFIX}_loaded_tokens", "Tokens whose KV moves handed over between engines.")
        loaded.add_metric((), self._gateway.tokens_loaded)
        yield from (moves, recomputed, loaded)

    def _queue(self) -> Iterator[Metric]:
        fleet = self._gateway.fleet
        queued = GaugeMetricFamily(
            f"{PREFIX}_requests_queued",
            "Requests that wait here for an engine with room, or for the pause barrier to open.",
        )
        queued.add_metric((), len(fleet.queue))
        waits = HistogramMetricFamily(
            f"{PREFIX}_queue_seconds", "How long requests waited here before they were sent to an engine, each time."
        )
        waits.add_metric((), fleet.waits.buckets(), sum_value=fleet.waits.sum_s)
        kept = GaugeMetricFamily(
            f"{PREFIX}_requests_kept",
            "Requests that are kept here for an engine that is being started, by that.",
            labels=("engine",),
        )
        counts = Counter(relay.kept_for for relay in self._gateway.relays.values())
        for engine in sorted({*self._gateway.fleet.expected, *counts} - {None}, key=str):
            kept.add_metric((str(engine),), counts[engine])
        yield from (queued, waits, kept)

    def _engines(self) -> Iterator[Metric]:
        usable = GaugeMetricFamily(
            f"{PREFIX}_engine_usable", "1: requests are routed to this engine.", labels=("engine",)
        )
        failures = CounterMetricFamily(
            f"{PREFIX}_engine_failures",
            "Attempts that this engine refused, broke off or hung with.",
            labels=("engine",),
        )
        for backend in self._gateway.fleet:
            usable.add_metric((backend.id,), backend.usable)
            failures.add_metric((backend.id,), backend.failures_total)
        yield from (usable, failures)

    def _barrier(self) -> Iterator[Metric]:
        barrier, report = self._gateway.barrier, self._gateway.barrier.report()
        closed = GaugeMetricFamily(f"{PREFIX}_barrier_closed", "1: nothing goes to engines, weights are being changed.")
        closed.add_metric((), barrier.closed is not None)
        closed_s = CounterMetricFamily(
            f"{PREFIX}_barrier_closed_seconds", "Time for which the pause barrier has been closed."
        )
        closed_s.add_metric((), barrier.closed_total_s)
        expired = CounterMetricFamily(
            f"{PREFIX}_barrier_leases_expired",
            "Leases that ended before whoever held them had the pause barrier opened.",
        )
        expired.add_metric((), barrier.expired_total)
        frozen = GaugeMetricFamily(f"{PREFIX}_requests_frozen", "Requests that stand still on paused engines.")
        frozen.add_metric((), report.frozen)
        yield from (closed, closed_s, expired, frozen)

    def _versions(self) -> Iterator[Metric]:
        gateway = self._gateway
        version = GaugeMetricFamily(
            f"{PREFIX}_policy_version", "Of each engine's weights, where it was told.", labels=("engine",)
        )
        for backend in gateway.fleet:
            if backend.policy_version is not None:
                version.add_metric((backend.id,), backend.policy_version)
        lags = HistogramMetricFamily(
            f"{PREFIX}_answer_version_lag",
            "Of answers that ended: policy versions by which the oldest token was behind the fleet's.",
        )
        counts = gateway.version_lags
        bounds = [(str(bound), sum(n for lag, n in counts.items() if lag <= bound)) for bound in LAG_BOUNDS]
        lags.add_metric(
            (), [*bounds, ("+Inf", counts.total())], sum_value=sum(lag * count for lag, count in counts.items())
        )
        stale = CounterMetricFamily(
            f"{PREFIX}_stale_requests", "Requests older than their bound, by what became of them.", labels=("action",)
        )
        for action in OnStale:
            stale.add_metric((action,), gateway.barrier.stale_total[action])
        cancelled = CounterMetricFamily(
            f"{PREFIX}_requests_cancelled", "Requests that were ended by order, by reason.", labels=("reason",)
        )
        for reason, count in sorted(gateway.cancelled_total.items()):
            cancelled.add_metric((reason,), count)
        yield from (version, lags, stale, cancelled)

    def _store(self) -> Iterator[Metric]:
        """Where answers are kept."""
        store = self._gateway.store
        if store is None:
            return
        failing = GaugeMetricFamily(f"{PREFIX}_ledger_failing", "1: answers are not kept at the moment.")
        failing.add_metric((), bool(store.failing))
        yield failing
        if (used_bytes := store.used_bytes) is not None:
            size = GaugeMetricFamily(f"{PREFIX}_ledger_bytes", "What the kept answers take on disk.")
            size.add_metric((), used_bytes)
            yield size
        counts = store.counts
        for name, text, value in (
            ("replayed_requests", "Requests that were answered with what was kept.", counts.replayed),
            ("resumed_requests", "Requests that went on from tokens that were kept.", counts.resumed),
            ("resumed_tokens", "Tokens that those had.", counts.resumed_tokens),
            ("ledger_unwritten", "Pieces of answers that the disk did not take.", counts.unwritten),
            ("ledger_pruned", "Requests whose kept answers were removed.", counts.pruned),
        ):
            counter = CounterMetricFamily(f"{PREFIX}_{name}", text)
            counter.add_metric((), value)
            yield counter
