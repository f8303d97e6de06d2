"""`orchestrrl plan render`: the command lines that engines are started with, without running them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.formats import ranges
from orchestrrl.cli.output import Output, fields, raise_faults
from orchestrrl.core.errors import ProblemFaults, shorten
from planner.model import ConfigurationId, GpuId

if TYPE_CHECKING:
    from orchestrrl.core.config.schema import FleetSettings
    from orchestrrl.fleet.deployers.command_line import CommandLine, EngineSpec


@command
def render(
    file: Annotated[Path, typer.Argument(help="The configuration file (YAML).")] = Path("orchestrrl.yaml"),
    configuration: Annotated[str, typer.Option(help="Engines of this configuration.")] = "",
    gpus: Annotated[str, typer.Option(help="The GPUs of one engine, e.g. 0,1 or 0-7.")] = "",
) -> Output:
    """Print the environment and the command line of each engine, to be pasted into a shell. Nothing is run.

    Engines are those of `fleet.engines`; with `--configuration` as many of that one as the fleet's GPUs make, or the
    one on `--gpus`. `fleet.launch` says what they are started with. An engine over several nodes, or under AFD, is
    several processes; each says where it belongs.

    Example:

        orchestrrl check-config --print-example > orchestrrl.yaml

        orchestrrl plan render orchestrrl.yaml

        orchestrrl plan render orchestrrl.yaml --configuration tp2 --gpus 4,5
    """
    from orchestrrl.daemon.configuration import load_config

    rendered = _rendered(load_config(file).fleet, configuration, gpus)
    blocks = [block for each in rendered for block in _blocks(*each)]
    return Output({"engines": [_json(*each) for each in rendered]}, "\n".join(blocks))


def _rendered(
    fleet: "FleetSettings", configuration: str, gpus: str
) -> "list[tuple[EngineSpec, str, tuple[CommandLine, ...]]]":
    """Return the engines that are wanted, each with its URL and its command lines. Raises ProblemFaults."""
    from orchestrrl.fabric.site_parts import numbers_in
    from orchestrrl.fleet.deployers.command_line import render, url_of
    from orchestrrl.fleet.launch import configured_engines, filled, launch_of

    faults, named = [], None
    try:
        named = tuple(map(GpuId, numbers_in(gpus))) if gpus else None
    except ValueError as error:
        faults.append(f"--gpus: {error}, got {shorten(gpus)}")
    if gpus and not configuration:
        faults.append(f"--gpus: needs --configuration, got {gpus!r}")
    if configuration and configuration not in fleet.layouts():
        known = ", ".join(sorted(fleet.layouts())) or "none"
        faults.append(f"--configuration: is not a configuration of the fleet (known: {known}), got {configuration!r}")
    if fleet.gpus is not None:
        count = fleet.gpus.count
        beyond = [gpu for gpu in named or () if gpu >= count]
        faults += [f"--gpus: must be less than fleet.gpus.count ({count}), got {gpu}" for gpu in beyond]
    try:
        launch = launch_of(fleet)
    except ProblemFaults as error:
        faults += error.faults
    if not configuration and not fleet.engines:
        faults.append("fleet.engines: has none, got nothing; or name a --configuration")
    raise_faults(faults)
    found = []
    for spec in filled(fleet, ConfigurationId(configuration), named) if configuration else configured_engines(fleet):
        try:
            found.append((spec, url_of(spec, launch), render(spec, launch)))
        except ProblemFaults as error:
            faults += error.faults
    raise_faults(dict.fromkeys(faults))
    return found


def _blocks(spec: "EngineSpec", url: str, lines: "Sequence[CommandLine]") -> list[str]:
    blocks = []
    for place, line in enumerate(lines, 1):
        several = f", process {place} of {len(lines)} ({line.role})" if len(lines) > 1 else ""
        answers = f", at {url}" if place == 1 else ""
        heading = (
            f"# {spec.engine}{several}: {spec.configuration} on GPUs {ranges(line.gpus)} of node {line.node}{answers}"
        )
        blocks.append(f"{heading}\n{line.shell()}\n")
    return blocks


def _json(spec: "EngineSpec", url: str, lines: "Sequence[CommandLine]") -> dict[str, Any]:
    return {
        "id": spec.engine,
        "configuration": spec.configuration,
        "gpus": sorted(spec.gpus),
        "url": url,
        "processes": [
            {
                **fields(line, "role node"),
                "gpus": list(line.gpus),
                "environment": dict(line.environment),
                "argv": list(line.argv),
            }
            for line in lines
        ],
    }
