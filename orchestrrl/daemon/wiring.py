"""Construct the daemon's parts in the order of their dependencies. The simulator and tests construct the same parts
with other DaemonEdges."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from time import perf_counter

from ocs_drivers.base import OcsDriver
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.schema import CircuitOwnership, Config, FabricSettings, RouterSettings
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.offload import Offload, inline
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.core.operator_pauses import PauseRegistry
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.fleet_coordinator import FleetCoordinator
from orchestrrl.daemon.mode import ModeSwitch
from orchestrrl.daemon.plan_book import PlanBook
from orchestrrl.daemon.planning import Planning
from orchestrrl.daemon.redeployment_wiring import DeployedEngineWatcher, RedeployedFleet
from orchestrrl.daemon.weight_circuits import circuits_of as sync_circuits_of
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.generation_circuits import GenerationCircuits
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.rerouting import Rerouting
from orchestrrl.fabric.route_drivers.driver import make_driver
from orchestrrl.fabric.switch_reader import SwitchReader
from orchestrrl.fabric.verification import FabricVerifier
from orchestrrl.fabric.window_tracker import QUANTILE, WindowTracker
from orchestrrl.fleet.pause_barrier import PauseBarrier, PauseRequest
from orchestrrl.fleet.pause_lease import PauseState
from orchestrrl.fleet.redeployment.actions import FleetDeployment
from orchestrrl.fleet.redeployment.controller import RedeploymentController
from orchestrrl.fleet.redeployment.turn import DeploymentTurn
from orchestrrl.weights.controller.controller import WeightSync
from orchestrrl.weights.controller.peer_hub import PeerHub
from orchestrrl.weights.controller.stale_versions import StaleVersions
from orchestrrl.weights.controller.state import EngineNow
from planner.cost.models import model_named
from planner.fabric.light import interfaces_at
from planner.fabric.model import EndpointId
from planner.fabric.route_plan import PacketSide, RoutingDomain, TorRouter
from planner.fabric.topology import Site
from planner.fabric.windows import CommitTimes
from planner.model import EngineHealth, EngineId, RequestId
from planner.sync_tree.network import LeftForMoves

FIRST_ROUTE_S = 1.0  # assumed duration of a route change before one was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonEdges:
    """The external dependencies of a daemon, except its nodes, together with the function that runs its computations.
    By default, the daemon controls no switches and deploys no engines, and computations run in the calling thread."""

    drivers: Mapping[str, OcsDriver] = field(default_factory=dict)  # by switch id
    deployment: FleetDeployment | None = None
    watch: Callable[[FleetCoordinator], DeployedEngineWatcher] | None = None  # watches deployed engines
    left_for_moves: Callable[[], LeftForMoves] | None = None  # None: the bandwidth that weight syncs leave
    known_output_tokens: Mapping[RequestId, int] | None = None  # for an oracle's plans
    offload: Offload = inline
    stopwatch: Callable[[], float] = perf_counter


@dataclass(frozen=True, slots=True)
class FabricParts:
    """The daemon's parts that control the optical fabric. The daemon runs `coordinator.run` and `routing.maintain` as
    tasks."""

    coordinator: CircuitCoordinator | None = None  # None: the configuration has no fabric
    routing: FabricRouting | None = None  # None: the configuration has no routers
    verifier: FabricVerifier | None = None
    gen_circuits: GenerationCircuits | None = None  # None: circuits do not follow the deployment


@dataclass(frozen=True, slots=True)
class WeightSyncParts:
    """The daemon's parts that control weight syncs. The daemon runs `syncs.run` as a task. The processes that send and
    receive weights (peers) attach to `hub`."""

    hub: PeerHub
    syncs: WeightSync


@dataclass(frozen=True, slots=True)
class Daemon:
    """The parts of one daemon that its servers and tasks use."""

    control_plane: ControlPlane
    fleet: FleetCoordinator
    circuits: CircuitExecutor
    windows: WindowTracker
    fabric: FabricParts
    weights: WeightSyncParts
    watch: DeployedEngineWatcher | None
    redeployer: RedeploymentController | None
    # To run before the pause barrier opens; its argument is the time at which the lease expires.
    before_resume: Callable[[float], Awaitable[str]] | None


def build_daemon(config: Config, journal: Journal, clock: Clock, edges: DaemonEdges | None = None) -> Daemon:
    """Construct a daemon. Its parts recover their state from the journal."""
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
    return Daemon(plane, fleet, circuits, windows, fabric, weights, watch, redeployer, before_resume)


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


def fabric_of(
    config: Config,
    switches: Mapping[str, OcsDriver],
    circuits: CircuitExecutor,
    windows: WindowTracker,
    pause_registry: PauseRegistry,
    mode: ModeSwitch,
    journal: Journal,
    clock: Clock,
    offload: Offload,
) -> FabricParts:
    site, settings = config.site_value(), config.fabric
    if site is None or settings is None:
        return FabricParts()
    from planner.fabric.materialize import materialize  # heavy, and most configurations have no fabric

    reader = SwitchReader(site, {switch.id: switches[switch.id] for switch in site.switches}, clock, circuits.owners)
    routing = _routing_of(site, settings, reader, journal, clock, offload) if settings.routers else None
    fabric = CircuitCoordinator(
        site,
        reader,
        circuits,
        windows,
        pause_registry,
        journal,
        clock,
        materialise=partial(materialize, site),
        mode=lambda: mode.current,
        times=CommitTimes(
            {switch.id: switch.device.reconfiguration_s for switch in site.switches},
            settings.route_s or (FIRST_ROUTE_S if settings.routers else 0.0),
        ),
        settings=settings,
        routing=routing,
        offload=offload,
    )
    verifier = FabricVerifier(fabric, routing, circuits, reader, pause_registry, clock)
    return FabricParts(fabric, routing, verifier, _gen_circuits(config, settings, fabric, clock))


def _gen_circuits(
    config: Config, settings: FabricSettings, fabric: CircuitCoordinator, clock: Clock
) -> GenerationCircuits | None:
    if settings.model is None:
        return None
    deployer = config.fleet.deployer
    # A redeployment past its point of no return must not fail because of its circuits.
    within_s = settings.boundary_within_s if deployer is None else deployer.check_within_s / 2
    within_s = min(within_s, settings.boundary_within_s)
    return GenerationCircuits(fabric, model_named(settings.model), settings, clock, within_s)


def _routing_of(
    site: Site, settings: FabricSettings, reader: SwitchReader, journal: Journal, clock: Clock, offload: Offload
) -> FabricRouting:
    tors = {EndpointId(each.tor): each for each in settings.routers}
    drivers = {tor: make_driver(each.driver, each.tor, each.options, clock) for tor, each in tors.items()}
    how = settings.rerouting
    return FabricRouting(
        site,
        interfaces_at(site, {tor: each.interfaces for tor, each in tors.items()}),
        Rerouting(drivers, domain_of(settings.routers, how.packet_hops), clock, how, offload),
        reader.scan,
        journal,
        clock,
        poll_s=how.poll_s,
        offload=offload,
    )


def domain_of(routers: Iterable[RouterSettings], packet_hops: int | None = None) -> RoutingDomain:
    return RoutingDomain(
        {
            EndpointId(each.tor): TorRouter(
                each.address,
                each.prefixes,
                None if each.packet_side is None else PacketSide(each.packet_side.interface, each.packet_side.address),
            )
            for each in routers
        },
        packet_hops,
    )


def weights_of(
    config: Config,
    fleet: FleetCoordinator,
    fabric: CircuitCoordinator | None,
    turn: DeploymentTurn,
    stale: StaleVersions,
    pause_registry: PauseRegistry,
    offload: Offload,
) -> WeightSyncParts:
    """Construct the parts for weight syncs."""
    settings, clock, journal = config.weights, fleet.clock, fleet.journal
    hub = PeerHub(clock, journal.generation, settings.patience_s, config.limits.nodes)

    def engines() -> Mapping[EngineId, EngineNow]:
        return {
            view.id: EngineNow(
                str(view.configuration or ""), view.health in (EngineHealth.OK, EngineHealth.SLOW), view.url
            )
            for view in fleet.state.engines(clock.now_s())
        }

    syncs = WeightSync(
        hub,
        BarrierFence(fleet.barrier, fleet.nodes, lambda version: source_of(version, hub)),
        sync_circuits_of(config, fabric, lambda: {id: state.peer for id, state in hub.peers.items()}),
        journal,
        pause_registry,
        clock,
        settings,
        engines=engines,
        deploying=lambda: turn.busy,
        stale=stale,
        offload=offload,
    )
    return WeightSyncParts(hub, syncs)


def source_of(version: int, hub: PeerHub) -> str:
    """Return the folder from which engines that start later can load the version. Such a folder exists only if every
    peer that serves engines has the complete version under the same path. Otherwise, return an empty string."""
    peers = [peer for peer in hub.attached().values() if peer.engines or peer.serves or peer.ranks_of]
    folders = {peer.folder for peer in peers}
    if len(folders) != 1 or "" in folders:
        return ""
    has = all(any(held.version == version and held.complete for held in peer.held) for peer in peers)
    return f"{folders.pop()}/v{version}" if has else ""


class BarrierFence:
    """Adapts the fleet's pause barrier to the interface that weight syncs use. `source` returns the folder from which
    engines that start later can load a version, or an empty string if there is no such folder."""

    def __init__(self, barrier: PauseBarrier, nodes: NodeRegistry, source: Callable[[int], str]) -> None:
        self._barrier = barrier
        self._nodes = nodes
        self._source = source

    @property
    def state(self) -> PauseState:
        return self._barrier.state

    def is_manned(self) -> bool:
        return bool(self._nodes.gateways())

    async def pause(self, holder: str, *, empty: bool, lease_s: float, deadline_s: float) -> str:
        frozen = FrozenRequests.TAKEN_BACK if empty else FrozenRequests.RECOMPUTE
        wish = PauseRequest(PauseMode.KEEP, frozen, holder, lease_s, deadline_s, weights_change=True)
        state = await self._barrier.pause(wish)
        assert state.lease is not None
        return state.lease.id

    async def renew(self, lease: str, lease_s: float) -> None:
        await self._barrier.renew(lease, lease_s)

    async def resume(self, lease: str, version: int | None, without: Collection[EngineId], reason: str) -> None:
        source = "" if version is None else self._source(version)
        await self._barrier.resume(lease, version, without, reason, source)

    def set_version(self, engines: Collection[EngineId], version: int, reason: str) -> None:
        self._barrier.set_version(engines, version, reason, self._source(version))

    def forget(self, engines: Collection[EngineId], why: str) -> None:
        self._barrier.forget(engines, why)
