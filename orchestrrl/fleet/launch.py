"""Derive the deployer and the start specification of each engine from `fleet.launch`, `fleet.deployer` and the layouts
of the engine configurations. Report faults in these sections of the configuration file.

The command lines themselves are rendered in `fleet/deployers/command_line.py`.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.launch import DeployerSettings, EngineDevice, EngineProduct
from orchestrrl.core.config.schema import Config, FleetSettings
from orchestrrl.core.errors import Permanent, ProblemFaults, did_you_mean, shorten
from orchestrrl.fleet.deployers.base import DEPLOYERS, Deployer, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec, render
from orchestrrl.fleet.deployers.layout_flags import PORTS_PER_GPU, simulated_costs
from planner.model import ConfigurationId, EngineId, GpuId


def launch_of(fleet: FleetSettings) -> EngineLaunch:
    """Return the launch settings that all engines share. Raises ProblemFaults if `fleet.launch` is missing."""
    settings = fleet.launch
    if settings is None:
        raise ProblemFaults(["fleet.launch: must be set, got nothing; see `orchestrrl check-config --print-example`"])
    hands_over = fleet.kv_transfer is not None and fleet.kv_transfer.connector is not None
    simulated = settings.engine is EngineProduct.SIMULATED
    as_written = {"engine", "device", "host", "nodes", "cores_per_gpu", "arguments", "environment"}
    return EngineLaunch(
        **settings.model_dump(include=as_written),
        python=settings.python or (sys.executable if simulated else "python3"),
        model=settings.model or "simulated",
        served_model_name=settings.served_model_name or "",
        per_node=fleet.gpus.per_node if fleet.gpus is not None else 8,
        first_port=settings.ports[0],
        last_port=settings.ports[1],
        kv_directory=(settings.kv_directory or "") if hands_over else "",
        weight_backend=settings.weight_backend and not simulated,
    )


def spec_of(
    fleet: FleetSettings,
    engine: EngineId,
    configuration: ConfigurationId,
    gpus: Sequence[GpuId],
    port: int | None = None,
) -> EngineSpec:
    """Return the start specification of one engine. Raises ProblemFaults if the configuration is unknown."""
    layouts = fleet.layouts()
    if configuration not in layouts:
        known = ", ".join(sorted(layouts)) or "none"
        raise ProblemFaults([f"configuration: must be one of fleet.configurations ({known}), got {configuration!r}"])
    costs = {each.id: each for each in fleet.configuration_values()}[configuration]
    simulated = fleet.launch is not None and fleet.launch.engine is EngineProduct.SIMULATED
    own = fleet.launch.configurations.get(configuration) if fleet.launch is not None else None
    return EngineSpec(
        engine=engine,
        configuration=configuration,
        parallelism=layouts[configuration],
        gpus=tuple(gpus),
        port=port,
        max_sequences=costs.max_sequences,
        arguments=own.arguments if own is not None else (),
        environment=own.environment if own is not None else {},
        usual=simulated_costs(costs, layouts[configuration]) if simulated else {},
    )


def configured_engines(fleet: FleetSettings) -> list[EngineSpec]:
    """Return a start specification for each entry of `fleet.engines`, with the port of the entry's URL. Raises
    ProblemFaults if an entry has no configuration or no GPUs."""
    specs, faults = [], []
    for place, engine in enumerate(fleet.engines):
        if engine.configuration is None:
            faults.append(f"fleet.engines[{place}].configuration: must be given to start {engine.id}, got nothing")
        if not engine.gpus:
            faults.append(f"fleet.engines[{place}].gpus: must be given to start {engine.id}, got nothing")
        if engine.configuration is None or not engine.gpus:
            continue
        url = urlsplit(engine.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        spec = spec_of(fleet, engine.engine, ConfigurationId(engine.configuration), engine.gpu_ids, port)
        specs.append(spec if engine.max_sequences is None else replace(spec, max_sequences=engine.max_sequences))
    if faults:
        raise ProblemFaults(faults)
    return specs


def filled(
    fleet: FleetSettings, configuration: ConfigurationId, gpus: Iterable[GpuId] | None = None
) -> list[EngineSpec]:
    """Return start specifications of engines with this configuration. If `gpus` is None, the result has one
    specification for each engine that fits on the fleet's GPUs. Otherwise, it has one specification, for an engine on
    `gpus`. Raises ProblemFaults if no engine fits or `fleet.gpus` is missing."""
    layout = fleet.layouts().get(configuration)
    if gpus is not None or layout is None:
        groups = [tuple(gpus or ())]
    elif fleet.gpus is None:
        raise ProblemFaults(["fleet.gpus: must be set unless --gpus is given, got nothing"])
    else:
        count, size = fleet.gpus.count, layout.gpus
        groups = [tuple(GpuId(g) for g in range(at, at + size)) for at in range(0, count - size + 1, size)]
        if not groups:
            raise ProblemFaults([f"fleet.gpus.count: must be >= {size} for configuration {configuration}, got {count}"])
    return [
        spec_of(fleet, EngineId(f"{configuration}-{place}"), configuration, group) for place, group in enumerate(groups)
    ]


def launch_faults(fleet: Mapping[Any, Any], known: Iterable[str]) -> list[str]:
    """Return the faults of `fleet.launch`, such as contradictions between it and the other settings of the fleet
    section. `fleet` is the section as read from the configuration file, before validation. `known` contains the ids of
    the engine configurations."""
    section = fleet.get("launch")
    if not isinstance(section, dict):
        return []
    faults = []
    if section.get("model") is None and section.get("engine") != EngineProduct.SIMULATED:
        faults.append("fleet.launch.model: is missing, got nothing")
    own = section.get("configurations")
    for name in own if isinstance(own, dict) else ():
        if name not in known:
            listing = ", ".join(sorted(known)) or "none"
            path = f"fleet.launch.configurations.{name}"
            faults.append(f"{path}: must be one of fleet.configurations ({listing}), got {name!r}")
    transfer = fleet.get("kv_transfer")
    if isinstance(transfer, dict) and transfer.get("connector") and section.get("kv_directory") is None:
        faults.append("fleet.launch.kv_directory: must be given if fleet.kv_transfer has a connector, got nothing")
    gpus = fleet.get("gpus")
    per_node = gpus.get("per_node", 8) if isinstance(gpus, dict) else 8
    ports = section.get("ports", [8100, 8199])
    whole = isinstance(ports, list) and len(ports) == 2 and all(type(n) is int for n in (*ports, per_node))
    if whole and ports[1] - ports[0] + 1 < PORTS_PER_GPU * per_node:
        wish = f"must have {PORTS_PER_GPU} ports for each of a node's {per_node} GPUs"
        faults.append(f"fleet.launch.ports: {wish}, got {ports}")
    if section.get("cores_per_gpu") and section.get("device") != EngineDevice.CPU:
        faults.append(f"fleet.launch.cores_per_gpu: is only for device cpu, got {section['cores_per_gpu']!r}")
    return faults


def deployer_faults(fleet: dict[Any, Any]) -> list[str]:
    """Return the faults of `fleet.deployer`, such as contradictions between it and the other settings of the fleet
    section. `fleet` is the section as read from the configuration file, before validation."""
    section = fleet.get("deployer")
    if not isinstance(section, dict):
        return []
    product = section.get("product", DeployerSettings.model_fields["product"].default)
    known = DEPLOYERS.names()
    faults = []
    if isinstance(product, str) and product and product not in known:
        listing = f"fleet.deployer.product: must be one of {', '.join(known)}, got {shorten(product)}"
        faults.append(listing + did_you_mean(product, known))
    return faults + [
        f"{path}: must be given if fleet.deployer is given, got nothing"
        for path, name in (("fleet.launch", "launch"), ("fleet.gpus", "gpus"))
        if not isinstance(fleet.get(name), dict)
    ]


def deployer_of(config: Config, clock: Clock) -> Deployer | None:
    """Return the configured deployer, or None if none is configured. Raises ProblemFaults if its settings are
    invalid."""
    settings = config.fleet.deployer
    if settings is None:
        return None
    identity = FleetIdentity(settings.name, str(Path(settings.folder).absolute()))
    try:
        make = DEPLOYERS.load(settings.product)
        deployer: Deployer = make(launch_of(config.fleet), identity, settings.options, clock)
    except ProblemFaults as error:
        raise ProblemFaults([f"fleet.deployer.{fault}" for fault in error.faults]) from error
    except Permanent as error:
        raise ProblemFaults([f"fleet.deployer.product: cannot use {settings.product!r}: {error}"]) from error
    return deployer


def start_faults(config: Config) -> list[str]:
    """Return the faults that prevent engines of the configurations in `fleet.configurations` from starting.
    Configurations from a profile are not checked, because not all of them need to be startable."""
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
