"""Construct what carries redeployments out, from `fleet.deployer` of the configuration."""

from typing import TYPE_CHECKING

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.launch import DeployerSettings, Standby
from orchestrrl.engines.managed import ManagedEngine, connect_managed
from orchestrrl.fleet.configured_deployer import deployer_of
from orchestrrl.fleet.launch import spec_of
from orchestrrl.fleet.redeployment.checks import AnswerTolerance
from orchestrrl.fleet.redeployment.steps import (
    RedeployTimeouts,
)

if TYPE_CHECKING:  # heavy, and many configurations have none of it
    from orchestrrl.core.config.schema import Config
    from orchestrrl.daemon.control_plane import ControlPlane
    from orchestrrl.fleet.redeployment.controller import RedeploymentController, RedeployPolicy

# A single question to an engine; what takes long, such as loading weights, has the limits of its step.
ASK_TIMEOUT_S = 120.0


def redeployer_of(config: "Config", control_plane: "ControlPlane", clock: Clock) -> "RedeploymentController | None":
    """For the daemon: it calls `recover` before it serves, and `close` at the end. Raises ProblemFaults."""
    from orchestrrl.fleet.redeployment.controller import RedeploymentController

    deployer = deployer_of(config, clock)
    settings, launch, gpus = config.fleet.deployer, config.fleet.launch, config.fleet.gpus
    if deployer is None or settings is None:
        return None
    assert launch is not None
    assert gpus is not None
    product = launch.engine

    def connect(url: str) -> ManagedEngine:
        return connect_managed(product, url, ASK_TIMEOUT_S)

    return RedeploymentController(
        control_plane,
        deployer,
        connect,
        {configuration.id: configuration for configuration in config.fleet.configuration_values()},
        lambda engine, configuration, on: spec_of(control_plane.config.fleet, engine, configuration, on),
        gpus_count=gpus.count,
        per_node=gpus.per_node,
        policy=policy_of(settings),
    )


def policy_of(settings: DeployerSettings) -> "RedeployPolicy":
    from orchestrrl.fleet.redeployment.controller import RedeployPolicy

    limits = RedeployTimeouts(
        drain_s=settings.drain_within_s,
        stop_s=settings.stop_within_s,
        start_s=settings.start_within_s,
        ready_s=settings.ready_within_s,
        load_s=settings.load_within_s,
        check_s=settings.check_within_s,
    )
    return RedeployPolicy(
        limits, AnswerTolerance(settings.compare_tokens, settings.compare_nats), settings.standby is Standby.KEEP
    )
