"""Send gateways the list of engines, with each engine's load and whether it accepts new requests."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import Config
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import EngineRoute, SetRoutes
from orchestrrl.fleet.state import FleetState
from planner.model import EngineHealth, EngineId, EngineView, NodeId

logger = logging.getLogger(__name__)

# A change is sent at once. While changes keep coming, as when a fleet starts, the time between two messages doubles
# from the first of these to the last: each message has all routes, and one message per change would send N^2 routes.
SPACING_FIRST_S = 0.05
SPACING_LAST_S = 1.0


@dataclass(slots=True)
class _Pace:
    """Enforces the minimum time between two messages that announce changed routes; see SPACING_FIRST_S."""

    spacing_s: float = 0.0
    sent_s: float = float("-inf")
    sending: asyncio.Task[None] | None = None

    def wait_s(self, now_s: float) -> float:
        return self.sent_s + self.spacing_s - now_s

    def sent(self, now_s: float) -> None:
        rested = now_s - self.sent_s > max(SPACING_FIRST_S, 2 * self.spacing_s)
        self.spacing_s = SPACING_FIRST_S if rested else min(SPACING_LAST_S, 2 * self.spacing_s)
        self.sent_s = now_s


@dataclass(slots=True, eq=False)
class RoutingTable:
    """The current routes to all engines. The routes are written to the journal when anything other than the load
    changes."""

    _config: Config
    _state: FleetState
    _nodes: NodeRegistry
    _runner: OperationRunner
    _journal: Journal
    _clock: Clock
    draining: set[EngineId] = field(default_factory=set)  # about to be stopped: gateways send them no new requests
    # Engines that are being started, and until when they are expected. Gateways keep requests for an engine while it is
    # listed here, even if an agent already reports it healthy.
    expected: dict[EngineId, float] = field(default_factory=dict)
    _load_index: Mapping[EngineId, float | None] = field(default_factory=dict)  # from the fast loop
    _journalled: dict[str, Any] = field(default_factory=lambda: {"routes": [], "expected": {}})
    _expected_before: dict[EngineId, float] = field(default_factory=dict)  # as last journalled
    _sent: dict[NodeId, tuple[SetRoutes, float]] = field(default_factory=dict)  # last sent to each gateway, and when
    _changes: _Pace = field(default_factory=_Pace)
    _losses: _Pace = field(default_factory=_Pace)

    def reconfigure(self, config: Config) -> None:
        self._config = config

    def reweigh(self, load_index: Mapping[EngineId, float | None]) -> None:
        """Set the load indexes that are sent with the routes from now on."""
        self._load_index = load_index

    def recover(self) -> None:
        """Restore from the journal the engines that had routes or were expected. A gateway that attaches before the
        engines' agents must keep its routes to them, and keep the requests that it holds for expected engines."""
        written = self._journal.newest(EntryKind.ROUTES, _written)
        if written is None:
            return
        now_s = self._clock.now_s()
        urls, self._expected_before = written
        for engine, url in urls.items():
            self._state.remember_engine(engine, url, now_s)
        self.expected.update(self._still_expected(self._expected_before, now_s))

    def attached(self, gateway: NodeId) -> None:
        """Mark a newly attached gateway as having no routes yet."""
        self._sent.pop(gateway, None)

    def changed(self, *, lost: bool = False) -> None:
        """Send the routes in the next iteration of the event loop, or as soon as the pace allows. If an engine was lost
        (`lost`), a separate pace applies, so that messages about added engines do not delay this message."""
        pace = self._losses if lost else self._changes
        if pace.sending is not None and not pace.sending.done():
            return
        try:
            pace.sending = asyncio.get_running_loop().create_task(self._send_changes(pace))
            pace.sending.add_done_callback(_report_failure)
        except RuntimeError:  # no event loop: the fast loop's next tick sends them
            pace.sending = None

    async def _send_changes(self, pace: "_Pace") -> None:
        if (wait_s := pace.wait_s(self._clock.now_s())) > 0:
            await self._clock.sleep(wait_s)
        now_s = self._clock.now_s()
        pace.sent(now_s)
        self.send(self._state.engines(now_s))

    def accepts(self, engine: EngineView) -> bool:
        """Return whether requests may go to the engine. The health of an engine without an agent is not considered
        here, because gateways check it."""
        well = engine.health is EngineHealth.OK or not self._state.reported(engine.id)
        changing = engine.id in self.draining or engine.id in self.expected
        return well and not (engine.draining or engine.outdated or changing)

    def close(self) -> None:
        for pace in (self._changes, self._losses):
            if pace.sending is not None:
                pace.sending.cancel()

    def send(self, engines: Sequence[EngineView]) -> None:
        """Send the routes to every attached gateway that does not have them yet. Unchanged routes are sent again after
        half the expiry time of an order, because a busy gateway may have refused an order that expired."""
        gateways = self._nodes.gateways()
        now_s = self._clock.now_s()
        expected = self._still_expected(self.expected, now_s)
        if not gateways and expected == self._expected_before:
            return
        routes = tuple(self._route(engine, engine.id in expected) for engine in engines)
        action = SetRoutes(routes, tuple(sorted(expected)), max(expected.values(), default=0.0))
        lasts_s = self._config.fast.operation_expiry_s
        self._sent = {gateway: sent for gateway, sent in self._sent.items() if gateway in gateways}
        for gateway in gateways:
            own = self._as_reached_by(gateway, engines, action)
            before, sent_s = self._sent.get(gateway, (None, 0.0))
            if own != before or now_s - sent_s >= lasts_s / 2:
                self._nodes.send(gateway, self._runner.next_operation(own, lasts_s))
                self._sent[gateway] = own, now_s
        listing = [{"engine": r.engine, "url": r.url, "health": r.health, "draining": r.draining} for r in routes]
        body: dict[str, Any] = {"routes": listing, "expected": expected}
        if body != self._journalled:
            self._journalled, self._expected_before = body, expected
            try:
                self._journal.append(now_s, EntryKind.ROUTES, "", body)
            except OrchestrRLError as error:  # gateways have received the routes even so
                logger.error("cannot write the routes to the journal: %s", error)

    def _as_reached_by(self, gateway: NodeId, engines: Sequence[EngineView], action: SetRoutes) -> SetRoutes:
        urls = self._state.urls_for(gateway, engines)
        if not urls:
            return action
        routes = tuple(replace(route, url=urls.get(route.engine, route.url)) for route in action.routes)
        return replace(action, routes=routes)

    @staticmethod
    def _still_expected(expected: Mapping[EngineId, float], now_s: float) -> dict[EngineId, float]:
        return {engine: until_s for engine, until_s in expected.items() if until_s > now_s}

    def kv_versions(self, engines: Iterable[EngineView]) -> dict[EngineId, str]:
        """Return the KV version of each engine, which includes its policy version. Engines with the same KV version can
        transfer KV cache to each other. The KV version is empty if the engine cannot transfer KV cache."""
        return {
            engine.id: f"{kv}@{engine.policy_version}" if (kv := self._kv_version(engine)) else "" for engine in engines
        }

    def _kv_version(self, engine: EngineView) -> str:
        """Return a key shared by engines of the same configuration and weights, between which KV cache can be
        transferred. Return an empty string if the engine cannot transfer KV cache."""
        links = self._config.fleet.kv_transfer
        if links is None or links.connector is None or engine.configuration is None:
            return ""
        return f"{engine.configuration}/{links.weights}"

    def _route(self, engine: EngineView, starting: bool) -> EngineRoute:
        # A gateway that attaches while weights are being changed must not record the previous version for the tokens
        # that it receives meanwhile.
        changing = self._state.weights.weights_changing
        fresh = engine.age_s is not None and engine.age_s <= self._config.fast.stale_after_s
        return EngineRoute(
            engine=engine.id,
            url=engine.url,
            health=engine.health if self._state.reported(engine.id) else None,
            load_index=self._load_index.get(engine.id),
            # Before the first sample the free part is unknown: report no capacity rather than a full cache.
            kv_capacity_tokens=0 if engine.age_s is None else engine.kv_capacity_tokens,
            kv_free_tokens=engine.kv_free_tokens,
            max_sequences=engine.max_sequences,
            draining=engine.draining or engine.outdated or engine.id in self.draining or starting,
            kv_version=self._kv_version(engine),
            pool=engine.pool,
            policy_version=None if changing else engine.policy_version,
            waiting=engine.waiting if fresh else None,
            newest_policy_version=None if changing else self._state.weights.newest,
        )


def _written(body: Mapping[str, Any]) -> tuple[dict[EngineId, str], dict[EngineId, float]]:
    """Return two mappings from a journal entry: each engine's URL, and the time until which each starting engine is
    expected."""
    urls = {EngineId(route["engine"]): str(route["url"]) for route in body["routes"]}
    return urls, {EngineId(engine): float(until_s) for engine, until_s in body.get("expected", {}).items()}


def _report_failure(sending: asyncio.Task[None]) -> None:
    """Log a failed send of the routes. The fast loop's next tick sends the same routes again."""
    if not sending.cancelled() and (error := sending.exception()) is not None:
        logger.error("cannot send the routes: %s", error)
