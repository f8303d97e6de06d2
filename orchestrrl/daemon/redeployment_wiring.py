"""Connect redeployments to the fleet, and construct the deployment from `fleet.deployer` in the configuration.

The daemon watches engines that a deployer started, as an agent would, since they may have no agent. While an agent
reports such an engine, only the agent's reports count. The daemon watches the engine again after the agent has been
silent for some time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from orchestrrl.agent.watch import EngineWatch, HealthLimits
from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.config.launch import Standby
from orchestrrl.core.config.schema import Config
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.nodes import NodeKind
from orchestrrl.daemon.fleet_coordinator import FleetCoordinator
from orchestrrl.engines.base import Engine, connect, connect_managed
from orchestrrl.fabric.generation_circuits import GenerationCircuits
from orchestrrl.fleet.deployers.base import DeployedInstance
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.launch import deployer_of
from orchestrrl.fleet.redeployment.actions import FleetDeployment
from orchestrrl.fleet.redeployment.book import RedeploymentOutcome
from orchestrrl.fleet.redeployment.checks import AnswerTolerance
from orchestrrl.fleet.redeployment.steps import RedeployTimeouts, ServedWeights
from orchestrrl.fleet.reports import EngineReport
from orchestrrl.fleet.state import STAND_IN
from orchestrrl.weights.controller.controller import WeightSync
from planner.model import EngineId, NodeId, Plan, PlanId

logger = logging.getLogger(__name__)

# For a single request to an engine; long ones, such as loading weights, have their step's limit.
ASK_TIMEOUT_S = 120.0
WATCHER = NodeId("daemon")
INTERVAL_S = 0.25  # the agents' scrape interval
SILENT_AFTER_S = 3.0  # the watcher replaces an agent after this silence
LOOK_S = 1.0  # interval between two checks for this silence


@dataclass(frozen=True, slots=True)
class _Watched:
    url: str
    product: str
    client: Engine
    task: asyncio.Task[None]


class DeployedEngineWatcher:
    """Watches the engines passed to the latest call of `follow`, until `close` is called."""

    def __init__(
        self,
        fleet: FleetCoordinator,
        *,
        make_engine: Callable[[str, str], Engine] = connect,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`make_engine` returns a client for an engine, given its product and URL."""
        self._fleet = fleet
        self._make_engine = make_engine
        self._interval_s = interval_s
        self._watched: dict[EngineId, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequence = 0

    def follow(self, engines: Mapping[EngineId, tuple[str, str]]) -> None:
        """Watch exactly these engines, each given with its (URL, product). Raises Permanent and changes nothing if a
        product is unknown."""
        known = {engine: (watched.url, watched.product) for engine, watched in self._watched.items()}
        fresh = {
            engine: self._make_engine(product, url)
            for engine, (url, product) in engines.items()
            if known.get(engine) != (url, product)
        }
        for engine in [engine for engine in known if engine not in engines or engine in fresh]:
            self._watched.pop(engine).task.cancel()
        for engine, client in fresh.items():
            url, product = engines[engine]
            task = asyncio.create_task(self._stand_in(engine, client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._watched[engine] = _Watched(url, product, client, task)

    async def close(self) -> None:
        self._watched.clear()
        await stop(*self._tasks)

    async def _stand_in(self, engine: EngineId, client: Engine) -> None:
        """Watch the engine while no agent reports it. Runs until cancelled."""
        watch: asyncio.Task[None] | None = None
        try:
            while True:
                alone = not self._spoken_for(engine)
                if watch is not None and (watch.done() or not alone):
                    await self._end(engine, watch)
                    watch = None
                if watch is None and alone:
                    watch = asyncio.create_task(self._watch(engine, client).run())
                await self._fleet.clock.sleep(LOOK_S)
        finally:
            if watch is not None:
                await self._end(engine, watch)
            await client.close()

    def _watch(self, engine: EngineId, client: Engine) -> EngineWatch:
        return EngineWatch(
            engine,
            client,
            partial(self._publish, client),
            agent=WATCHER,
            clock=self._fleet.clock,
            interval_s=self._interval_s,
            limits=HealthLimits(),
        )

    async def _end(self, engine: EngineId, watch: asyncio.Task[None]) -> None:
        await stop(watch)
        if not watch.cancelled() and watch.exception() is not None:
            logger.error("%s: a defect ended its watch, which is restarted", engine, exc_info=watch.exception())

    def _publish(self, client: Engine, report: EngineReport) -> None:
        watched = self._watched.get(report.engine)
        if watched is None or watched.client is not client or self._spoken_for(report.engine):
            return
        self._sequence += 1
        self._fleet.engine_reported(replace(report, sequence=self._sequence), STAND_IN)

    def _spoken_for(self, engine: EngineId) -> bool:
        """Return whether an agent that lists the engine has reported recently."""
        since_s = self._fleet.clock.now_s() - SILENT_AFTER_S
        hellos = (state.attachment.hello for state in self._fleet.nodes.states() if state.last_report_s >= since_s)
        return any(hello.kind is NodeKind.AGENT and engine in hello.engines for hello in hellos)


class RedeployedFleet:
    """Gives redeployments access to the fleet: its moves, weights, circuits and engine watches."""

    def __init__(
        self,
        fleet: FleetCoordinator,
        weights: WeightSync,
        circuits: GenerationCircuits | None,
        watch: DeployedEngineWatcher | None,
        product: str,
    ) -> None:
        self.journal, self.clock = fleet.journal, fleet.clock
        self.state, self.routes = fleet.state, fleet.routes
        self.carry_out = fleet.carry_out
        self._fleet = fleet
        self._weights = weights
        self._circuits = circuits
        self._watch = watch
        self._product = product

    def plan_named(self, plan: str) -> Plan:
        return self._fleet.plans.get(PlanId(plan))

    def current_weights(self) -> ServedWeights:
        newest, source = self._fleet.barrier.state.newest, self._fleet.barrier.state.newest_source
        ours = newest is not None and self._weights.book.fleet.version == newest
        return ServedWeights(
            newest, source, tensors_only=ours and bool(source)
        )  # a peer's folder has a version's tensors

    def redeployment_hold(self) -> str:
        """Return why engines must not be changed now, or an empty string if a change is allowed."""
        lease = self._fleet.barrier.state.lease
        return "" if lease is None else f"the pause barrier is closed: lease {lease}"

    def weights_reported(self, engines: Sequence[EngineId], weights: ServedWeights) -> None:
        known = {view.id for view in self.state.engines(self.clock.now_s())}  # an operator may have removed some
        if weights.version is not None and (there := [engine for engine in engines if engine in known]):
            with _although_unwritten():
                self._fleet.barrier.set_version(there, weights.version, "loaded by a redeployment")

    def engine_stopped(self, engine: EngineId) -> None:
        """Remove the engine from the fleet, and drop its weight version."""
        self.state.remove_engine(engine)
        with _although_unwritten():
            self._fleet.barrier.gone([engine])

    def engines_deployed(self, running: Mapping[EngineId, DeployedInstance]) -> None:
        """Watch the deployer's running engines, and update the gateways' routes."""
        if self._watch is not None:
            serving = {id: (up.url, self._product) for id, up in running.items() if up.url and not up.lent}
            self._watch.follow(serving)
        self.routes.send(self.state.engines(self.clock.now_s()))

    async def circuits_follow(self, engines: Sequence[EngineSpec]) -> str:
        return "" if self._circuits is None else await self._circuits.follow(engines)

    def redeployment_ended(self, plan: PlanId, outcome: RedeploymentOutcome) -> None:
        self._fleet.planning.costs.started(outcome.starts)
        self._fleet.plans.deployment_ended(plan, outcome)


@contextmanager
def _although_unwritten() -> Iterator[None]:
    """Log a failed journal write in the block instead of raising the error. A redeployment proceeds after such a
    failure, because the engines' real state does not depend on the write."""
    try:
        yield
    except OrchestrRLError as error:
        logger.error("cannot write the engines' weight versions to the journal: %s", error)


def deployment_of(config: Config, clock: Clock) -> FleetDeployment | None:
    """Return the daemon's deployment, or None if no deployer is configured. Raises ProblemFaults if the deployer's
    settings are invalid."""
    deployer = deployer_of(config, clock)
    settings, launch, gpus = config.fleet.deployer, config.fleet.launch, config.fleet.gpus
    if deployer is None or settings is None:
        return None
    assert launch is not None
    assert gpus is not None
    connect = partial(connect_managed, launch.engine, timeout_s=ASK_TIMEOUT_S)
    limits = RedeployTimeouts(
        drain_s=settings.drain_within_s,
        stop_s=settings.stop_within_s,
        start_s=settings.start_within_s,
        ready_s=settings.ready_within_s,
        load_s=settings.load_within_s,
        check_s=settings.check_within_s,
    )
    tolerance = AnswerTolerance(settings.compare_tokens, settings.compare_nats)
    keep_asleep = settings.standby is Standby.KEEP
    return FleetDeployment(
        deployer, connect, gpus.count, gpus.per_node, limits=limits, tolerance=tolerance, keep_asleep=keep_asleep
    )
