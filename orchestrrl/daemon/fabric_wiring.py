"""Construct what changes circuits and routes, from `fabric` of the configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ocs_drivers.base import OcsDriver
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.fabric import FabricSettings, RouterSettings
from orchestrrl.core.config.schema import Config
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.offload import Offload
from orchestrrl.core.operator_pauses import PauseRegistry
from orchestrrl.daemon.mode import ModeSwitch
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.generation_circuits import GenerationCircuits, TrafficVolumes
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.rerouting import Rerouting, ReroutingTimeouts
from orchestrrl.fabric.route_drivers.driver import make_driver
from orchestrrl.fabric.stage_commit import CommitRules
from orchestrrl.fabric.switch_reader import SwitchReader
from orchestrrl.fabric.verification import FabricVerifier
from orchestrrl.fabric.window_tracker import WindowTracker
from planner.cost.models import model_named
from planner.fabric.commit_times import Allowance, CommitTimes
from planner.fabric.light import interfaces_at
from planner.fabric.model import EndpointId
from planner.fabric.route_plan import PacketSide, RoutingDomain, TorRouter
from planner.fabric.topology import Site

FIRST_ROUTE_S = 1.0  # that routers are taken to need, before one change of theirs was measured


@dataclass(frozen=True, slots=True)
class FabricParts:
    """The parts that serve the fabric. The daemon keeps `coordinator.run` and `routing.maintain` as tasks."""

    coordinator: CircuitCoordinator | None = None  # None: the configuration has no fabric
    routing: FabricRouting | None = None  # None: it has no routers
    verifier: FabricVerifier | None = None
    gen_circuits: GenerationCircuits | None = None  # None: circuits do not follow the deployment


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

    drivers = {switch.id: switches[switch.id] for switch in site.switches}
    routing = (
        _routing(site, settings, SwitchReader(site, drivers), journal, clock, offload) if settings.routers else None
    )
    fabric = CircuitCoordinator(
        site,
        SwitchReader(site, drivers, owners=circuits.owners),
        circuits,
        windows,
        pause_registry,
        journal,
        clock,
        materialise=partial(materialize, site),
        mode=lambda: mode.current,
        times=CommitTimes(
            {switch.id: switch.device.reconfiguration_s for switch in site.switches},
            allowance=Allowance(route_s=settings.route_s or (FIRST_ROUTE_S if settings.routers else 0.0)),
        ),
        rules=CommitRules(
            settings.margin_s,
            settings.within_s,
            settings.boundary_within_s,
            settings.min_fraction,
            settings.max_moves_per_stage,
            settings.route_s,
            settings.most_risk,
        ),
        routing=routing,
        offload=offload,
    )
    verifier = FabricVerifier(fabric, routing, circuits, SwitchReader(site, drivers, clock), pause_registry, clock)
    return FabricParts(fabric, routing, verifier, _gen_circuits(config, settings, fabric, clock))


def _gen_circuits(
    config: Config, settings: FabricSettings, fabric: CircuitCoordinator, clock: Clock
) -> GenerationCircuits | None:
    if settings.model is None:
        return None
    volumes = TrafficVolumes(model_named(settings.model), settings.tokens_per_period, settings.first_fleet_gpu)
    deployer = config.fleet.deployer
    # A switch that is past its point of no return must not fail over its circuits.
    within_s = settings.boundary_within_s if deployer is None else deployer.check_within_s / 2
    return GenerationCircuits(fabric, volumes, clock, min(within_s, settings.boundary_within_s))


def _routing(
    site: Site, settings: FabricSettings, reader: SwitchReader, journal: Journal, clock: Clock, offload: Offload
) -> FabricRouting:
    tors = {EndpointId(each.tor): each for each in settings.routers}
    drivers = {tor: make_driver(each.driver, each.tor, each.options, clock) for tor, each in tors.items()}
    how = settings.rerouting
    limits = ReroutingTimeouts(how.link_up_s, how.neighbour_s, how.settle_s)
    return FabricRouting(
        site,
        interfaces_at(site, {tor: each.interfaces for tor, each in tors.items()}),
        Rerouting(drivers, domain_of(settings.routers, how.packet_hops), clock, limits, offload),
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
