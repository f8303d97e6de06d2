"""Tell gateways which engines there are, how loaded each is, and whether anything new may go there."""

from collections.abc import Iterable, Mapping, Sequence

from orchestrrl.clock import Clock
from orchestrrl.config import Config
from orchestrrl.execute.runner import Runner
from orchestrrl.journal import Journal, Kind
from orchestrrl.nodes import NodeRegistry
from orchestrrl.operations import Route, SetRoutes
from orchestrrl.state import State
from planner.model import EngineId, EngineView


class Routes:
    """The routes as they stand. They are written down when they change in more than load."""

    def __init__(
        self, config: Config, state: State, nodes: NodeRegistry, runner: Runner, journal: Journal, clock: Clock
    ) -> None:
        self.config = config
        self.draining: set[EngineId] = set()  # engines that are about to be stopped: gateways send them nothing new
        self.expected: dict[EngineId, float] = {}  # engines that are being started, each until a time
        self.load_index: Mapping[EngineId, float | None] = {}  # as the fast loop last found it
        self._state = state
        self._nodes = nodes
        self._runner = runner
        self._journal = journal
        self._clock = clock
        self._told: tuple[tuple[object, ...], ...] = ()

    def recover(self) -> None:
        """Engines that were routed to: a gateway that attaches before their agents do must not lose them."""
        latest = self._journal.latest(Kind.ROUTES)
        for route in latest.body["routes"] if latest else ():
            self._state.remember_engine(EngineId(route["engine"]), route["url"], self._clock.now_s())

    def send(self, engines: Sequence[EngineView]) -> None:
        """To every attached gateway."""
        gateways = self._nodes.gateways()
        if not gateways:
            return
        routes = tuple(self._route(engine) for engine in engines)
        for gateway in gateways:
            order = self._runner.next_operation(SetRoutes(routes), self.config.fast.operation_expiry_s)
            self._nodes.send(gateway, order)
        shape = tuple((route.engine, route.url, route.health, route.draining) for route in routes)
        if shape != self._told:
            self._told = shape
            listing = [{"engine": r.engine, "url": r.url, "health": r.health, "draining": r.draining} for r in routes]
            self._journal.append(self._clock.now_s(), Kind.ROUTES, "", {"routes": listing})

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

    def _route(self, engine: EngineView) -> Route:
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
            draining=engine.draining or engine.outdated or engine.id in self.draining,
            kv_version=self._kv_version(engine),
            pool=engine.pool,
            policy_version=engine.policy_version,
            waiting=engine.waiting if fresh else None,
            newest_policy_version=self._state.weights.newest,
        )
