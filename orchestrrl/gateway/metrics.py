"""What a gateway tells Prometheus. Read from the gateway at each scrape, so requests pay nothing for it."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from orchestrrl.gateway.core import Gateway

PREFIX = "orchestrrl_gateway"


class GatewayCollector(Collector):
    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._moves()
        yield from self._engines()

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

    def _engines(self) -> Iterator[Metric]:
        usable = GaugeMetricFamily(
            f"{PREFIX}_engine_usable", "1: requests are routed to this engine.", labels=("engine",)
        )
        failures = CounterMetricFamily(
            f"{PREFIX}_engine_failures",
            "Attempts that this engine refused, broke off or hung with.",
            labels=("engine",),
        )
        for slot in self._gateway.fleet:
            usable.add_metric((slot.id,), slot.usable)
            failures.add_metric((slot.id,), slot.failures_total)
        yield from (usable, failures)
