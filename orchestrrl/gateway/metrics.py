"""Prometheus metrics of a gateway. The metrics are computed at each scrape, so that they add no cost to requests."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrrl.core.metrics import labelled_counter, labelled_gauge
from orchestrrl.gateway.failovers import failover_metrics
from orchestrrl.gateway.ledger.ledger import OnStale
from orchestrrl.gateway.routing.sessions import SessionOutcome

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
        yield from self._sessions()
        yield from self._engines()
        yield from self._store()
        yield from self._barrier()
        yield from self._versions()

    def _requests(self) -> Iterator[Metric]:
        ledger = self._gateway.ledger
        counts: Counter[tuple[str, str]] = Counter()
        held = 0
        for record in ledger:
            counts[(record.engine or "", record.state)] += 1
            held += record.context_tokens
        help_text = "Requests in flight, by engine (empty: held by the gateway) and state."
        yield labelled_gauge(f"{PREFIX}_requests", help_text, ("engine", "state"), sorted(counts.items()))
        help_text = "Prompt and generated tokens of the requests in flight."
        yield GaugeMetricFamily(f"{PREFIX}_tokens_held", help_text, held)
        help_text, finished = "Requests that ended, by finish reason.", sorted(ledger.finished_by_reason.items())
        yield labelled_counter(f"{PREFIX}_requests_finished", help_text, "finish_reason", finished)
        help_text = "Tokens of the answers that ended."
        yield CounterMetricFamily(f"{PREFIX}_generated_tokens", help_text, ledger.generated_total)

    def _moves(self) -> Iterator[Metric]:
        gateway = self._gateway
        outcomes = [("done", gateway.moves_done), ("refused", gateway.moves_refused)]
        yield labelled_counter(f"{PREFIX}_moves", "Moves between engines, by outcome.", "outcome", outcomes)
        help_text = "Tokens that engines prefilled again because of moves."
        yield CounterMetricFamily(f"{PREFIX}_recomputed_tokens", help_text, gateway.tokens_recomputed)
        help_text = "Tokens whose KV was transferred between engines by moves."
        yield CounterMetricFamily(f"{PREFIX}_loaded_tokens", help_text, gateway.tokens_loaded)

    def _queue(self) -> Iterator[Metric]:
        fleet = self._gateway.fleet
        help_text = "Requests that wait for an engine with room, or for the pause barrier to open."
        yield GaugeMetricFamily(f"{PREFIX}_requests_queued", help_text, len(fleet.queue))
        yield from fleet.waits.collect()
        counts = Counter(relay.kept_for for relay in self._gateway.relays.values())
        kept = [(str(engine), counts[engine]) for engine in sorted({*fleet.expected, *counts} - {None}, key=str)]
        help_text = "Requests held for an engine that is being started, by engine."
        yield labelled_gauge(f"{PREFIX}_requests_kept", help_text, "engine", kept)

    def _sessions(self) -> Iterator[Metric]:
        fleet = self._gateway.fleet
        sessions = fleet.sessions
        help_text = "Sessions that had a turn within the last --session-ttl-s seconds."
        yield GaugeMetricFamily(f"{PREFIX}_sessions", help_text, sessions.known(fleet.clock.now_s()))
        help_text = (
            "Turns of sessions, by outcome: new, warm (on the engine with the KV of the turn before), moved (another "
            "engine was expected to answer earlier) or cold (the KV is no longer cached, or its engine is unavailable)."
        )
        turns = [(outcome, sessions.turns[outcome]) for outcome in SessionOutcome]
        yield labelled_counter(f"{PREFIX}_session_turns", help_text, "outcome", turns)
        help_text = "Prompt tokens of sessions whose KV was expected in the engine's cache."
        yield CounterMetricFamily(f"{PREFIX}_session_cached_tokens", help_text, sessions.warm_tokens_total)

    def _engines(self) -> Iterator[Metric]:
        fleet, help_text = self._gateway.fleet, "1 if requests are routed to this engine."
        usable = [(backend.id, backend.usable) for backend in fleet]
        yield labelled_gauge(f"{PREFIX}_engine_usable", help_text, "engine", usable)
        help_text = "Failures of this engine: unreachable, answer broken off, or pause or resume failed."
        failures = [(backend.id, backend.failures_total) for backend in fleet]
        yield labelled_counter(f"{PREFIX}_engine_failures", help_text, "engine", failures)

    def _barrier(self) -> Iterator[Metric]:
        barrier, help_text = self._gateway.barrier, "1 if the pause barrier is closed: no request is sent to engines."
        yield GaugeMetricFamily(f"{PREFIX}_barrier_closed", help_text, barrier.closed is not None)
        help_text = "Total time for which the pause barrier was closed, in seconds."
        yield CounterMetricFamily(f"{PREFIX}_barrier_closed_seconds", help_text, barrier.closed_total_s)
        help_text = "Pause leases that expired before their holder opened the pause barrier."
        yield CounterMetricFamily(f"{PREFIX}_barrier_leases_expired", help_text, barrier.expired_total)
        help_text = "Requests frozen on paused engines."
        yield GaugeMetricFamily(f"{PREFIX}_requests_frozen", help_text, barrier.report().frozen)

    def _versions(self) -> Iterator[Metric]:
        gateway, help_text = self._gateway, "Policy version of each engine's weights, if known."
        versions = [(each.id, each.policy_version) for each in gateway.fleet]
        yield labelled_gauge(f"{PREFIX}_policy_version", help_text, "engine", versions)
        lags = gateway.version_lags
        bounds = [(str(bound), float(sum(n for lag, n in lags.items() if lag <= bound))) for bound in LAG_BOUNDS]
        bounds.append(("+Inf", lags.total()))
        help_text = "Policy versions by which the oldest token of an ended answer was behind the fleet."
        total = sum(lag * count for lag, count in lags.items())
        yield HistogramMetricFamily(f"{PREFIX}_answer_version_lag", help_text, bounds, total)
        help_text = "Requests that exceeded their version lag, by action."
        stale = [(action, gateway.barrier.stale_total[action]) for action in OnStale]
        yield labelled_counter(f"{PREFIX}_stale_requests", help_text, "action", stale)
        help_text, cancelled = "Requests that were cancelled, by reason.", sorted(gateway.cancelled_total.items())
        yield labelled_counter(f"{PREFIX}_requests_cancelled", help_text, "reason", cancelled)

    def _store(self) -> Iterator[Metric]:
        """Yield the metrics of the ledger's store, if the gateway has one."""
        store = self._gateway.store
        if store is None:
            return
        help_text = "1 if the ledger cannot currently be written."
        yield GaugeMetricFamily(f"{PREFIX}_ledger_failing", help_text, bool(store.failing))
        if (used_bytes := store.used_bytes) is not None:
            yield GaugeMetricFamily(f"{PREFIX}_ledger_bytes", "Bytes that the stored answers use on disk.", used_bytes)
        counts = store.counts
        for name, text, value in (
            ("replayed_requests", "Requests answered with a stored answer.", counts.replayed),
            ("resumed_requests", "Requests continued from stored tokens.", counts.resumed),
            ("resumed_tokens", "Stored tokens from which requests continued.", counts.resumed_tokens),
            ("ledger_unwritten", "Pieces of answers that could not be written to disk.", counts.unwritten),
            ("ledger_pruned", "Requests whose stored answers were removed.", counts.pruned),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value)
