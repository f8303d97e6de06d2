"""Construct what changes circuits and routes, from `fabric` of the configuration. Heavy modules load late."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ocs_drivers.base import OcsDriver
from orchestrrl.core.clock import Clock
from orchestrrl.core.config.fabric import RouterSettings

if TYPE_CHECKING:  # heavy, and most configurations have none of it
    from orchestrrl.core.config.schema import Config
    from orchestrrl.core.journal.store import Journal
    from orchestrrl.daemon.control_plane import ControlPlane
    from orchestrrl.fabric.circuit_executor import CircuitExecutor
    from orchestrrl.fabric.coordinator import CircuitCoordinator, PacketRouting
    from orchestrrl.fabric.generation_circuits import GenerationCircuits
    from orchestrrl.fabric.packet_routing import FabricRouting
    from orchestrrl.fabric.route_drivers.base import RouteDriver
    from orchestrrl.fabric.verification import FabricVerifier
    from orchestrrl.fabric.window_tracker import WindowTracker
    from planner.fabric.model import EndpointId
    from planner.fabric.route_plan import RoutingDomain

FIRST_ROUTE_S = 1.0  # that routers are taken to need, before one change of theirs was measured


def gen_circuits_of(config: "Config", fabric: "CircuitCoordinator | None", clock: Clock) -> "GenerationCircuits | None":
    """For the daemon. None where circuits do not follow the deployment."""
    settings = config.fabric
    if fabric is None or settings is None or settings.model is None:
        return None
    from orchestrrl.fabric.generation_circuits import GenerationCircuits, TrafficVolumes
    from planner.cost.models import model_named

    volumes = TrafficVolumes(model_named(settings.model), settings.tokens_per_period, settings.first_fleet_gpu)
    deployer = config.fleet.deployer
    # A switch that is past its point of no return must not fail over its circuits.
    within_s = settings.boundary_within_s if deployer is None else deployer.check_within_s / 2
    return GenerationCircuits(fabric, volumes, clock, min(within_s, settings.boundary_within_s))


def verifier_of(control_plane: "ControlPlane", drivers: Mapping[str, OcsDriver]) -> "FabricVerifier | None":
    """For the daemon, once the plane has its fabric. None where there is none."""
    if control_plane.fabric is None or control_plane.circuits is None:
        return None
    from orchestrrl.fabric.switch_reader import SwitchReader
    from orchestrrl.fabric.verification import FabricVerifier

    site = control_plane.fabric.site
    glass = SwitchReader(site, {switch.id: drivers[switch.id] for switch in site.switches}, control_plane.clock)
    return FabricVerifier(
        control_plane.fabric,
        control_plane.routing,
        control_plane.circuits,
        glass,
        control_plane.pause_registry,
        control_plane.clock,
    )


def fabric_of(
    config: "Config",
    drivers: Mapping[str, OcsDriver],
    circuits: "CircuitExecutor",
    hub: "WindowTracker",
    control_plane: "ControlPlane",
    clock: Clock,
    routing: "PacketRouting | None" = None,
) -> "CircuitCoordinator | None":
    """For the daemon: it keeps `run` as a task. None where the configuration has no fabric."""
    site, settings = config.site_value(), config.fabric
    if site is None or settings is None:
        return None
    from orchestrrl.fabric.coordinator import CircuitCoordinator, CommitRules
    from orchestrrl.fabric.operator_overrides import OperatorOverrides
    from orchestrrl.fabric.switch_reader import SwitchReader
    from planner.fabric.commit_times import Allowance, CommitTimes
    from planner.fabric.materialize import materialize

    return CircuitCoordinator(
        site,
        SwitchReader(site, {switch.id: drivers[switch.id] for switch in site.switches}, owners=circuits.owners),
        circuits,
        hub,
        OperatorOverrides(site, control_plane.journal, clock),
        control_plane.pause_registry,
        control_plane.journal,
        clock,
        materialise=lambda intent, state: materialize(site, intent, state),
        mode=lambda: control_plane.mode,
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
        offload=asyncio.to_thread,
    )


def domain_of(routers: Iterable[RouterSettings], packet_hops: int | None = None) -> "RoutingDomain":
    from planner.fabric.model import EndpointId
    from planner.fabric.route_plan import PacketSide, RoutingDomain, TorRouter

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


def routing_of(
    config: "Config",
    switches: Mapping[str, OcsDriver],
    journal: "Journal",
    clock: Clock,
    routers: "Mapping[EndpointId, RouteDriver] | None" = None,
) -> "FabricRouting | None":
    """For the daemon: it keeps `maintain` as a task. `routers` stand in for those of the configuration. None where
    nobody here reroutes."""
    site, section = config.site_value(), config.fabric
    if site is None or section is None or not section.routers:
        return None
    from orchestrrl.fabric.packet_routing import FabricRouting
    from orchestrrl.fabric.rerouting import Rerouting, ReroutingTimeouts
    from orchestrrl.fabric.route_drivers.registry import make_driver
    from orchestrrl.fabric.switch_reader import SwitchReader
    from planner.fabric.light import interfaces_at
    from planner.fabric.model import EndpointId

    drivers = routers or {
        EndpointId(each.tor): make_driver(each.driver, each.tor, each.options, clock) for each in section.routers
    }
    how = section.rerouting
    limits = ReroutingTimeouts(how.link_up_s, how.neighbour_s, how.settle_s)
    return FabricRouting(
        site,
        interfaces_at(site, {EndpointId(each.tor): each.interfaces for each in section.routers}),
        Rerouting(drivers, domain_of(section.routers, how.packet_hops), clock, limits, asyncio.to_thread),
        SwitchReader(site, {switch.id: switches[switch.id] for switch in site.switches}).scan,
        journal,
        clock,
        poll_s=how.poll_s,
        offload=asyncio.to_thread,
    )
