"""The fabric as the configuration has it: the section `fabric`, and what the daemon makes of it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ocs_drivers.base import OcsDriver
from orchestrrl.core.clock import Clock
from orchestrrl.core.documents import Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.routers import RouterSettings, SteeringSettings, router_faults

if TYPE_CHECKING:  # heavy, and most configurations have none of it
    from orchestrrl.core.config.schema import Config
    from orchestrrl.daemon.control_plane import ControlPlane
    from orchestrrl.fabric.circuit_executor import CircuitExecutor
    from orchestrrl.fabric.coordinator import Coordinator, Routing
    from orchestrrl.fabric.generation_circuits import GenCircuits
    from orchestrrl.fabric.verification import FabricVerifier
    from orchestrrl.fabric.windows import TraceHub
    from planner.fabric.topology import Site

FIRST_ROUTE_S = 1.0  # that routers are taken to need, before one change of theirs was measured

Share = Annotated[float, Field(strict=False, ge=0, le=1)]


class FabricSettings(Section):
    """When circuits are changed, and how carefully."""

    site: Name  # path of a site's file, from the configuration's own folder
    # A window counts if its length, but for this share of cases, has covered what a commit takes and this margin.
    quantile: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    # By adding up the ranks': a rank's is never below 0.5 %, so that of many ranks `quantile` is not what is promised.
    most_risk: Annotated[float, Field(gt=0, le=1)] = 1.0
    margin_s: NonNegativeFloat = 0.005
    within_s: PositiveFloat = 30.0  # how long a period waits for its windows
    boundary_within_s: PositiveFloat = 60.0  # the same, where the job stands still for it
    min_fraction: Share = 0.5  # of its circuits, that an endpoint keeps at every point of a change
    max_moves_per_stage: PositiveInt = 1024
    # From link up until packets take it: what is reckoned with where routers follow links by themselves (none listed
    # here), and else before it was measured.
    route_s: NonNegativeFloat = 0.0
    routers: tuple[RouterSettings, ...] = Field(default=(), strict=False)
    steering: SteeringSettings = SteeringSettings()
    # Where this names a model (see planner/cost/models.py), circuits of Gen follow the deployment at its switches.
    model: Name | None = None
    first_fleet_gpu: NonNegativeInt = 0  # the site's number of the fleet's GPU 0
    tokens_per_period: PositiveFloat = 1e6  # that an engine decodes between them


def read_fabric_site(section: Any, folder: Path) -> tuple["Site | None", list[str]]:
    """The site that the section names, or what is wrong with it."""
    path = section.get("site") if isinstance(section, dict) else None
    if not isinstance(path, str) or not path:
        return None, []
    from orchestrrl.fabric.site import read_site

    try:
        return read_site(folder / path), []
    except ProblemFaults as error:
        # A file that cannot be read names itself.
        named = (fault if fault.startswith(str(folder / path)) else f"{path}: {fault}" for fault in error.faults)
        return None, [f"fabric.site: {fault}" for fault in named]


def fabric_faults(document: dict[Any, Any], site: "Site | None") -> list[str]:
    """Faults between the site and the rest of the configuration."""
    if site is None:
        return []
    listing = document.get("ocs")
    entries = [entry for entry in listing if isinstance(entry, dict)] if isinstance(listing, list) else []
    driven = {entry["id"] for entry in entries if isinstance(entry.get("id"), str)}
    faults = [
        f"ocs: must have every switch of fabric.site, {switch.id!r} is missing"
        for switch in site.switches
        if switch.id not in driven
    ]
    section = document["fabric"]
    faults += _model_faults(document, section, site)
    return faults + router_faults(section.get("routers"), site)


def _model_faults(document: dict[Any, Any], section: Any, site: "Site") -> list[str]:
    from planner.cost.models import UnknownModel, model_named

    name, first_gpu = section.get("model"), section.get("first_fleet_gpu", 0)
    if not isinstance(name, str):
        return []
    faults = []
    try:
        model_named(name)
    except UnknownModel as error:
        faults.append(f"fabric.model: {error}, got {name!r}")
    fleet = document.get("fleet")
    if not isinstance(fleet, dict) or not fleet.get("deployer"):
        faults.append(f"fabric.model: circuits follow the switches of fleet.deployer, and there is none, got {name!r}")
    gpus = fleet.get("gpus") if isinstance(fleet, dict) else None
    count = gpus.get("count") if isinstance(gpus, dict) else None
    if isinstance(count, int) and isinstance(first_gpu, int):
        nowhere = [gpu for gpu in range(first_gpu, first_gpu + count) if gpu not in site.server_of]
        if nowhere:
            faults.append(
                f"fabric.first_fleet_gpu: {len(nowhere)} of the fleet's {count} GPUs are none of the site's"
                f" ({nowhere[0]} is the first), got {first_gpu}"
            )
    return faults


def gen_circuits_of(config: "Config", fabric: "Coordinator | None", clock: Clock) -> "GenCircuits | None":
    """For the daemon. None where circuits do not follow the deployment."""
    settings = config.fabric
    if fabric is None or settings is None or settings.model is None:
        return None
    from orchestrrl.fabric.generation_circuits import GenCircuits, Volumes
    from planner.cost.models import model_named

    volumes = Volumes(model_named(settings.model), settings.tokens_per_period, settings.first_fleet_gpu)
    deployer = config.fleet.deployer
    # A switch that is past its point of no return must not fail over its circuits.
    within_s = settings.boundary_within_s if deployer is None else deployer.check_within_s / 2
    return GenCircuits(fabric, volumes, clock, min(within_s, settings.boundary_within_s))


def verifier_of(plane: "ControlPlane", drivers: Mapping[str, OcsDriver]) -> "FabricVerifier | None":
    """For the daemon, once the plane has its fabric. None where there is none."""
    if plane.fabric is None or plane.circuits is None:
        return None
    from orchestrrl.fabric.switch_reader import Glass
    from orchestrrl.fabric.verification import FabricVerifier

    site = plane.fabric.site
    glass = Glass(site, {switch.id: drivers[switch.id] for switch in site.switches}, plane.clock)
    return FabricVerifier(plane.fabric, plane.routing, plane.circuits, glass, plane.holds, plane.clock)


def fabric_of(
    config: "Config",
    drivers: Mapping[str, OcsDriver],
    circuits: "CircuitExecutor",
    hub: "TraceHub",
    plane: "ControlPlane",
    clock: Clock,
    routing: "Routing | None" = None,
) -> "Coordinator | None":
    """For the daemon: it keeps `run` as a task. None where the configuration has no fabric."""
    site, settings = config.site_value(), config.fabric
    if site is None or settings is None:
        return None
    from orchestrrl.fabric.coordinator import Coordinator, Rules
    from orchestrrl.fabric.operator_overrides import OperatorsWord
    from orchestrrl.fabric.switch_reader import Glass
    from planner.fabric.commit_times import Allowance, CommitTimes
    from planner.fabric.materialize import materialize
    from planner.fabric.templates import TemplateBook

    templates = TemplateBook()
    return Coordinator(
        site,
        Glass(site, {switch.id: drivers[switch.id] for switch in site.switches}, owners=circuits.owners),
        circuits,
        hub,
        OperatorsWord(site, plane.journal, clock),
        plane.holds,
        plane.journal,
        clock,
        materialise=lambda intent, state: materialize(site, intent, state, templates.learn(intent)),
        mode=lambda: plane.mode,
        times=CommitTimes(
            {switch.id: switch.device.reconfiguration_s for switch in site.switches},
            allowance=Allowance(route_s=settings.route_s or (FIRST_ROUTE_S if settings.routers else 0.0)),
        ),
        rules=Rules(
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
