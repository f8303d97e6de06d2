"""Who starts and stops engines, as the configuration has it: `fleet.deployer`, and what the daemon makes of it."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from orchestrrl.core.clock import Clock
from orchestrrl.core.documents import Name, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from orchestrrl.core.errors import Permanent, ProblemFaults, did_you_mean, shorten
from orchestrrl.engines.managed import ManagedEngine, connect_managed
from orchestrrl.fleet.deployers.base import Deployer, FleetIdentity, known_deployers, make_deployer
from orchestrrl.fleet.deployers.command_line import render
from orchestrrl.fleet.launch import filled, launch_of, spec_of
from orchestrrl.fleet.redeployment.checks import Tolerance
from orchestrrl.fleet.redeployment.steps import Limits
from planner.model import ConfigurationId

if TYPE_CHECKING:  # they import this module
    from orchestrrl.core.config.schema import Config
    from orchestrrl.daemon.control_plane import ControlPlane
    from orchestrrl.fleet.redeployment.controller import Switching

WHERE = "fleet.deployer"
# A single question to an engine; what takes long, such as loading weights, has the limits of its step.
ASK_TIMEOUT_S = 120.0


class Standby(StrEnum):
    """What becomes of engines that a switch replaces and that can sleep."""

    STOP = "stop"
    KEEP = "keep"  # asleep, for a later switch to wake


class DeployerSettings(Section):
    """Who starts and stops engines, and how long each step of a switch may take."""

    product: Name = "local"
    options: dict[str, Any] = Field(default_factory=dict)  # the product's own
    name: Name = "orchestrrl"  # of the fleet: whose engines are whose, on machines that fleets share
    folder: Name = "orchestrrl-engines"  # for records and logs
    standby: Annotated[Standby, Field(strict=False)] = Standby.STOP
    drain_within_s: NonNegativeFloat = 30.0  # for requests that cannot move to finish
    stop_within_s: PositiveFloat = 60.0
    start_within_s: PositiveFloat = 60.0
    ready_within_s: PositiveFloat = 600.0  # from its start until an engine answers
    load_within_s: PositiveFloat = 300.0  # weights
    check_within_s: PositiveFloat = 120.0  # warm-up, verification
    # A new engine must find likely what the old ones answer: mean difference of log-probabilities over so many tokens
    compare_tokens: PositiveInt = 16
    compare_nats: PositiveFloat = 0.1

    def limits(self) -> Limits:
        return Limits(
            self.drain_within_s,
            self.stop_within_s,
            self.start_within_s,
            self.ready_within_s,
            self.load_within_s,
            self.check_within_s,
        )

    def tolerance(self) -> Tolerance:
        return Tolerance(self.compare_tokens, self.compare_nats)


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


def deployer_of(config: "Config", clock: Clock) -> Deployer | None:
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


def start_faults(config: "Config") -> list[str]:
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


def switching_of(config: "Config", plane: "ControlPlane", clock: Clock) -> "Switching | None":
    """For the daemon: it calls `recover` before it serves, and `close` at the end. Raises ProblemFaults."""
    from orchestrrl.fleet.redeployment.controller import Policy, Switching

    deployer = deployer_of(config, clock)
    settings, launch, gpus = config.fleet.deployer, config.fleet.launch, config.fleet.gpus
    if deployer is None or settings is None:
        return None
    assert launch is not None
    assert gpus is not None
    product = launch.engine

    def connect(url: str) -> ManagedEngine:
        return connect_managed(product, url, ASK_TIMEOUT_S)

    return Switching(
        plane,
        deployer,
        connect,
        {configuration.id: configuration for configuration in config.fleet.configuration_values()},
        lambda engine, configuration, on: spec_of(plane.config.fleet, engine, configuration, on),
        gpus_count=gpus.count,
        per_node=gpus.per_node,
        policy=Policy(settings.limits(), settings.tolerance(), settings.standby is Standby.KEEP),
    )
