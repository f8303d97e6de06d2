"""Check `fleet.deployer` of the configuration, and make the deployer that it names."""

from pathlib import Path
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.launch import DeployerSettings
from orchestrrl.core.config.schema import Config
from orchestrrl.core.errors import Permanent, ProblemFaults, did_you_mean, shorten
from orchestrrl.fleet.deployers.base import Deployer, FleetIdentity, known_deployers, make_deployer
from orchestrrl.fleet.deployers.command_line import render
from orchestrrl.fleet.launch import filled, launch_of
from planner.model import ConfigurationId

WHERE = "fleet.deployer"


def deployer_faults(fleet: dict[Any, Any]) -> list[str]:
    """Faults between `fleet.deployer` and the rest of the section, as written."""
    section = fleet.get("deployer")
    if not isinstance(section, dict):
        return []
    product = section.get("product", DeployerSettings.model_fields["product"].default)
    known = known_deployers()
    faults = []
    if isinstance(product, str) and product and product not in known:
        listing = f"{WHERE}.product: must be one of {', '.join(known)}, got {shorten(product)}"
        faults.append(listing + did_you_mean(product, known))
    return faults + [
        f"{path}: must be given where fleet.deployer is, got nothing"
        for path, name in (("fleet.launch", "launch"), ("fleet.gpus", "gpus"))
        if not isinstance(fleet.get(name), dict)
    ]


def deployer_of(config: Config, clock: Clock) -> Deployer | None:
    """None where the configuration has none. Raises ProblemFaults for what is wrong with it."""
    settings = config.fleet.deployer
    if settings is None:
        return None
    identity = FleetIdentity(settings.name, str(Path(settings.folder).absolute()))
    try:
        return make_deployer(settings.product, launch_of(config.fleet), identity, settings.options, clock)
    except ProblemFaults as error:
        raise ProblemFaults([f"{WHERE}.{fault}" for fault in error.faults]) from error
    except Permanent as error:
        raise ProblemFaults([f"{WHERE}.product: {error}, got {settings.product!r}"]) from error


def start_faults(config: Config) -> list[str]:
    """What could never start of the configurations that are written out; a profile's may be more than are ever used."""
    fleet = config.fleet
    if fleet.deployer is None or fleet.launch is None:
        return []
    launch, faults = launch_of(fleet), []
    for entry in fleet.configurations:
        try:
            render(filled(fleet, ConfigurationId(entry.id))[0], launch)
        except ProblemFaults as error:
            faults += error.faults
    return list(dict.fromkeys(faults))
