"""Construct the daemon's parts, each from those before it. The simulator and tests build the same with other edges."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from time import perf_counter

from ocs_drivers.base import OcsDriver
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import CircuitOwnership, Config
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.offload import Offload, inline
from orchestrrl.core.operator_pauses import PauseRegistry
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.engine_watcher import DeployedEngineWatcher
from orchestrrl.daemon.fabric_wiring import fabric_of
from orchestrrl.daemon.fleet_coordinator import FleetCoordinator
from orchestrrl.daemon.mode import ModeSwitch
from orchestrrl.daemon.plan_book import PlanBook
from orchestrrl.daemon.planning import Planning
from orchestrrl.daemon.redeployment_wiring import RedeployedFleet
from orchestrrl.daemon.weight_syncs import WeightSyncParts, weights_of
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.generation_circuits import GenerationCircuits
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.verification import FabricVerifier
from orchestrrl.fabric.window_tracker import QUANTILE, WindowTracker
from orchestrrl.fleet.redeployment.actions import FleetDeployment
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from orchestrrl.weights.controller.stale_versions import StaleVersions
from planner.model import RequestId
from planner.sync_tree.nic_share import LeftForMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonEdges:
    """What a daemon acts on and reads beside its nodes, and how it computes. The defaults have no devices and compute
    in place."""

    drivers: Mapping[str, OcsDriver] = field(default_factory=dict)  # by switch
    deployment: FleetDeployment | None = None
    watch: Callable[[FleetCoordinator], DeployedEngineWatcher] | None = None  # of deployed engines
    left_for_moves: Callable[[], LeftForMoves] | None = None  # None: what weight syncs leave
    known_output_tokens: Mapping[RequestId, int] | None = None  # for an oracle's plans
    offload: Offload = inline
    stopwatch: Callable[[], float] = perf_counter


@dataclass(frozen=True, slots=True)
class Daemon:
    """The parts of one daemon that its servers and tasks use."""

    control_plane: ControlPlane
    fleet: FleetCoordinator
    circuits: CircuitExecutor
    windows: WindowTracker
    fabric: CircuitCoordinator | None
    routing: FabricRouting | None
    verifier: FabricVerifier | None
    gen_circuits: GenerationCircuits | None
    weights: WeightSyncParts
    watch: DeployedEngineWatcher | None
    redeployer: RedeploymentController | None
    # To be done before the pause barrier opens; given when it opens by itself.
    before_resume: Callable[[float], Awaitable[str]] | None


def build_daemon(config: Config, journal: Journal, clock: Clock, edges: DaemonEdges | None = None) -> Daemon:
    """Construction recovers what the journal holds."""
    edges = edges or DaemonEdges()
    mode = ModeSwitch(config.mode, journal, clock)
    turn = DeploymentTurn()
    stale = StaleVersions()
    plans = PlanBook(journal, clock)
    planning = planning_of(config, journal, clock, edges)
    fleet = FleetCoordinator(config, journal, clock, mode, turn, plans, planning, stale.restarted)
    pauses = PauseRegistry(journal, clock)
    circuits = circuits_of(config, edges.drivers, journal, clock)
    windows = WindowTracker(clock, config.fabric.quantile if config.fabric else QUANTILE, config.limits.nodes)
    fabric = fabric_of(config, edges.drivers, circuits, windows, pauses, mode, journal, clock, edges.offload)
    weights = weights_of(config, fleet, fabric.coordinator, turn, stale, pauses, edges.offload)
    watch = edges.watch(fleet) if edges.watch else None
    product = config.fleet.launch.engine if config.fleet.launch else ""
    redeployed = RedeployedFleet(fleet, weights.syncs, fabric.gen_circuits, watch, product)
    redeployer = before_resume = None
    if edges.deployment is not None:
        redeployer = RedeploymentController(redeployed, edges.deployment, turn, config.fleet)
        before_resume = partial(fabric.gen_circuits.after_sync, redeployer) if fabric.gen_circuits else None
    left = edges.left_for_moves or (lambda: weights.syncs.left_for_moves)
    plane = ControlPlane(fleet, mode, pauses, turn, redeployer, left, edges.offload, edges.stopwatch)
    fabric_parts = fabric.coordinator, fabric.routing, fabric.verifier, fabric.gen_circuits
    return Daemon(plane, fleet, circuits, windows, *fabric_parts, weights, watch, redeployer, before_resume)


def planning_of(config: Config, journal: Journal, clock: Clock, edges: DaemonEdges) -> Planning:
    return Planning(
        config,
        lambda id, body: journal.append(clock.now_s(), EntryKind.PROFILE_REFITTED, id, body),
        lambda: datetime.fromtimestamp(clock.now_s(), UTC).date().isoformat(),
        unstartable=edges.deployment.unstartable if edges.deployment else lambda _: {},
        known_output_tokens=edges.known_output_tokens,
    )


def circuits_of(config: Config, drivers: Mapping[str, OcsDriver], journal: Journal, clock: Clock) -> CircuitExecutor:
    owns_all = {entry.id for entry in config.ocs if entry.owns is CircuitOwnership.ALL}
    circuits = CircuitExecutor(drivers, journal, clock, owns_all)
    circuits.recover()
    return circuits
