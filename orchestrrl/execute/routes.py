"""Tell gateways which engines there are, how loaded each is, and whether anything new may go there."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from orchestrrl.clock import Clock
from orchestrrl.config import Config
from orchestrrl.errors import OrchestrRLError
from orchestrrl.execute.runner import Runner
from orchestrrl.journal import Journal, Kind
from orchestrrl.nodes import NodeRegistry
from orchestrrl.operations import Route, SetRoutes
from orchestrrl.state import State
from planner.model import EngineId, EngineView

logger = logging.getLogger(__name__)


class Routes:
    """The routes as they stand. They are written down when they change in more than load."""

    def __init__(
        self, config: Config, state: State, nodes: NodeRegistry, runner: Runner, journal: Journal, clock: Clock
    ) -> None:
        self.config = config
        self.draining: set[EngineId] = set()  # engines that are about to be stopped: gateways send them nothing new
        # Engines that are being started, and until when that is believed: gateways keep requests for them, and send
        # them there once they are no longer named here, whoever reports them well before.
        self.expected: dict[EngineId, float] = {}
        self.load_index: Mapping[EngineId, float | None] = {}  # as the fast loop last found it
        self._state = state
        self._nodes = nodes
        self._runner = runner
        self._journal = journal
        self._clock = clock
        self._told: tuple[tuple[object, ...], ...] = ()
        self._expected_before: dict[EngineId, float] = {}  # as written down

    def recover(self) -> None:
        """Engines that were routed to, or expected: a gateway that attaches before their agents do must not lose
        them, nor send elsewhere what it keeps for them."""
        latest = self._journal.latest(Kind.ROUTES)
        if latest is None:
            return
        now_s = self._clock.now_s()
        for route in latest.body["routes"]:
            self._state.remember_engine(EngineId(route["engine"]), route["url"], now_s)
        for engine, until_s in latest.body.get("expected", {}).items():
            self._expected_before[EngineId(engine)] = until_s
        self.expected.update(self._still_expected(self._expected_before, now_s))

    def send(self, engines: Sequence[EngineView]) -> None:
        """To every attached gateway."""
        gateways = self._nodes.gateways()
        expected = self._still_expected(self.expected, self._clock.now_s())
        if not gateways and expected == self._expected_before:
            return
        routes = tuple(self._route(engine, engine.id in expected) for engine in engines)
        action = SetRoutes(routes, tuple(sorted(expected)), max(expected.values(), default=0.0))
        for gateway in gateways:
            self._nodes.send(gateway, self._runner.next_operation(action, self.config.fast.operation_expiry_s))
        shape = (
            *((route.engine, route.url, route.health, route.draining) for route in routes),
            *sorted(expected.items()),
        )
        if shape != self._told:
            self._told, self._expected_before = shape, expected
            listing = [{"engine": r.engine, "url": r.url, "health": r.health, "draining": r.draining} for r in routes]
            try:
                self._journal.append(self._clock.now_s(), Kind.ROUTES, "", {"routes": listing, "expected": expected})
            except OrchestrRLError as error:  # gateways have them all the same
                logger.error("routes cannot be written down: %s", error)

    @staticmethod
    def _still_expected(expected: Mapping[EngineId, float], now_s: float) -> dict[EngineId, float]:
        return {engine: until_s for engine, until_s in expected.items() if until_s > now_s}

    def kv_versions(self, engines: Iterable[EngineView]) -> dict[EngineId, str]:
        """Engines of the same one can hand KV over to each other; with the policy version, as gateways have it."""
        return {
            engine.id: f"{kv}@{engine.policy_version}" if (kv := self._kv_version(engine)) else "" for engine in engines
        }

    def _kv_version(self, engine: EngineView) -> str:
        """Engines hand KV over to those of the same configuration and weights; empty: to none."""
        links = self.config.fleet.kv_transfer
        if links is None or links.connector is None or engine.configuration is None:
            return ""
        return f"{engine.configuration}/{links.weights}"

    def _route(self, engine: EngineView, starting: bool) -> Route:
        fresh = engine.age_s is not None and engine.age_s <= self.config.fast.stale_after_s
        return Route(
            engine=engine.id,
            url=engine.url,
            health=engine.health if self._state.reported(engine.id) else None,
            load_index=self.load_index.get(engine.id),
            # How much of it is free is not known before the first sample: better none than one that is always full.
            kv_capacity_tokens=0 if engine.age_s is None else engine.kv_capacity_tokens,
            kv_free_tokens=engine.kv_free_tokens,
            max_sequences=engine.max_sequences,
            draining=engine.draining or engine.outdated or engine.id in self.draining or starting,
            kv_version=self._kv_version(engine),
            pool=engine.pool,
            policy_version=engine.policy_version,
            waiting=engine.waiting if fresh else None,
            newest_policy_version=self._state.weights.newest,
        )
