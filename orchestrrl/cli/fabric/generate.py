"""`orchestrrl fabric generate`: the file of a regular site, from a few numbers."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import JsonFlag, with_flags
from orchestrrl.cli.output import print_view, raise_faults, write_file
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten

if TYPE_CHECKING:
    from planner.fabric.topology import SwitchModel


def _option(text: str) -> Any:
    return typer.Option(help=text)


@dataclass(frozen=True, kw_only=True)
class SiteFlags:
    """The options of `orchestrrl fabric generate`; those of `SiteShape` have its names."""

    train_pods: Annotated[int, _option("PoDs that train.")] = 1
    gen_pods: Annotated[int, _option("PoDs that generate.")] = 1
    servers_per_pod: Annotated[int, _option("Servers of each PoD.")] = 8
    gpus_per_server: Annotated[int, _option("GPUs of each server.")] = 8
    nics_per_server: Annotated[int, _option("NICs of each server.")] = 8
    rails: Annotated[int | None, _option("ToRs that the NICs of one server are on.  [default: one for each NIC]")] = (
        None
    )
    servers_per_tor: Annotated[
        int | None, _option("Servers on one ToR, at most.  [default: as many as 32 ports take]")
    ] = None
    tor_uplinks: Annotated[int | None, _option("Fibres of each ToR.  [default: for as much capacity up as down]")] = (
        None
    )
    uplinks_per_pod: Annotated[int, _option("Bundles that a PoD's lanes to the core are in.")] = 1
    core_lanes: Annotated[
        int | None, _option("Lanes of each PoD to the core.  [default: half of its ToRs' fibres]")
    ] = None
    response_lanes: Annotated[
        int | None,
        _option("Lanes of each Gen PoD that are kept for responses.  [default: 1 if Train PoDs keep half of theirs]"),
    ] = None
    link_gbps: Annotated[float, _option("Of a circuit, each way.")] = 200.0
    nic_gbps: Annotated[float, _option("Of a NIC, each way.")] = 200.0
    device: Annotated[str, _option("Optical switches: one of table 2's, or NAME:PORTS:RECONFIGURATION_S.")] = (
        "piezo_polatis"
    )
    core_device: Annotated[str, _option("Those of the core.  [default: as the others]")] = ""
    agg_switches: Annotated[int | None, _option("Switches of each PoD.  [default: as few as have the ports]")] = None
    core_switches: Annotated[int | None, _option("Switches of the core.  [default: as few as have the ports]")] = None
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it there, not to standard output.")] = None
    as_json: JsonFlag = False


@with_flags(SiteFlags)
def generate(flags: SiteFlags) -> None:
    """Write the file of a regular site: rail-aligned PoDs, each ToR and uplink fibred to every switch of its PoD, each
    uplink to every switch of the core, and lanes kept for responses.

    What is not given is as in the paper's simulations: servers of 8 GPUs and 8 NICs of 200 Gbps, Polatis switches. ToRs
    then have as much capacity up as down, and half of it fits through a PoD's uplinks. There are as few switches as
    have the ports. A combination that cannot be is told with what to change, exit status 2.

    Example:

        orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

        orchestrrl fabric generate --train-pods 24 --gen-pods 40 --servers-per-pod 32 --core-device mems_3d_calient
    """
    from orchestrrl.cli.fabric.check import summary
    from orchestrrl.fabric.site import site_document, site_text
    from planner.fabric.generate import regular_site
    from planner.fabric.shape import ImpossibleSite, SiteShape

    agg, core = _devices(flags.device, flags.core_device)
    sizes = {name: value for name, value in vars(flags).items() if name in SiteShape.__dataclass_fields__}
    try:
        site = regular_site(SiteShape(**{**sizes, "agg_device": agg, "core_device": core}))
    except ImpossibleSite as error:
        faults = [_with_flags(f"{each.parameter}: {each.message}, got {each.value}") for each in error.faults]
        raise ProblemFaults(faults) from None
    text = json.dumps(site_document(site), indent=1) + "\n" if flags.as_json else site_text(site)
    if flags.out is not None:
        write_file(flags.out, text)
    print_view(text if flags.out is None else [f"{flags.out}: {summary(site)}"])


def _with_flags(message: str) -> str:
    """Parameters as they are named on the command line."""
    from planner.fabric.shape import SiteShape

    names = "|".join(SiteShape.__dataclass_fields__)
    flagged = re.sub(rf"\b({names})\b", lambda name: f"--{name[0].replace('_', '-')}", message)
    return flagged.replace("--agg-device", "--device")


def _devices(agg: str, core: str) -> "tuple[SwitchModel, SwitchModel]":
    """Raises ProblemFaults with the faults of both."""
    faults: list[str] = []
    found = []
    for flag, text in (("--device", agg), ("--core-device", core or agg)):
        try:
            found.append(_device(text))
        except ValueError as error:
            fault = f"{flag}: {error}, got {shorten(text)}"
            faults += [fault] if core or flag == "--device" else []
    raise_faults(faults)
    return found[0], found[1]


def _device(text: str) -> "SwitchModel":
    from pydantic import TypeAdapter, ValidationError

    from orchestrrl.fabric.site_parts import DevicePart, Id
    from planner.fabric.topology import DEVICES, SwitchModel

    name, *numbers = text.split(":")
    if not numbers and name in DEVICES:
        return DEVICES[name]
    if not numbers:
        raise ValueError(f"is not known (known: {', '.join(DEVICES)}; any other as NAME:PORTS:RECONFIGURATION_S)")
    if name in DEVICES:
        raise ValueError(f"is known by that name already, with {DEVICES[name].ports} ports; take another name")
    try:
        ports, reconfiguration_s = int(numbers[0]), float(numbers[1])
    except (ValueError, IndexError):
        raise ValueError("must be NAME:PORTS:RECONFIGURATION_S, such as lab:64:0.012") from None
    try:
        TypeAdapter(Id).validate_python(name)
        DevicePart(ports=ports, reconfiguration_s=reconfiguration_s)
    except ValidationError as error:
        raise ValueError(
            ", ".join(fault.rpartition(", got")[0].removeprefix("(document): ") for fault in faults_of(error))
        ) from None
    return SwitchModel(name, reconfiguration_s, ports)
