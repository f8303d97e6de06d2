"""`orchestrrl fabric generate`: the file of a regular site, from a few numbers."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, fail, print_lines, reporting_errors
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten

if TYPE_CHECKING:
    from planner.fabric.topology import SwitchModel

HELP = """Write the file of a regular site: rail-aligned PoDs, each ToR and uplink fibred to every switch of its PoD,
each uplink to every switch of the core, and lanes kept for responses.

What is not given is as in the paper's simulations: servers of 8 GPUs and 8 NICs of 200 Gbps, Polatis switches. ToRs
then have as much capacity up as down, and half of it fits through a PoD's uplinks. There are as few switches as have
the ports. A combination that cannot be is told with what to change, exit status 2.

Example:

    orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

    orchestrrl fabric generate --train-pods 24 --gen-pods 40 --servers-per-pod 32 --core-device mems_3d_calient
"""


def register(app: typer.Typer) -> None:
    group(app, "fabric").command("generate", help=HELP)(generate)


def _option(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text)


def generate(
    train_pods: Annotated[int, _option("--train-pods", "PoDs that train.")] = 1,
    gen_pods: Annotated[int, _option("--gen-pods", "PoDs that generate.")] = 1,
    servers_per_pod: Annotated[int, _option("--servers-per-pod", "Servers of each PoD.")] = 8,
    gpus_per_server: Annotated[int, _option("--gpus-per-server", "GPUs of each server.")] = 8,
    nics_per_server: Annotated[int, _option("--nics-per-server", "NICs of each server.")] = 8,
    rails: Annotated[
        int | None, _option("--rails", "ToRs that the NICs of one server are on.  [default: one for each NIC]")
    ] = None,
    servers_per_tor: Annotated[
        int | None, _option("--servers-per-tor", "Servers on one ToR, at most.  [default: as many as 32 ports take]")
    ] = None,
    tor_uplinks: Annotated[
        int | None, _option("--tor-uplinks", "Fibres of each ToR.  [default: for as much capacity up as down]")
    ] = None,
    uplinks_per_pod: Annotated[int, _option("--uplinks-per-pod", "Bundles that a PoD's lanes to the core are in.")] = 1,
    core_lanes: Annotated[
        int | None, _option("--core-lanes", "Lanes of each PoD to the core.  [default: half of its ToRs' fibres]")
    ] = None,
    response_lanes: Annotated[
        int | None,
        _option(
            "--response-lanes",
            "Lanes of each Gen PoD that are kept for responses.  [default: 1 if Train PoDs keep half of theirs]",
        ),
    ] = None,
    link_gbps: Annotated[float, _option("--link-gbps", "Of a circuit, each way.")] = 200.0,
    nic_gbps: Annotated[float, _option("--nic-gbps", "Of a NIC, each way.")] = 200.0,
    device: Annotated[
        str, _option("--device", "Optical switches: one of table 2's, or NAME:PORTS:RECONFIGURATION_S.")
    ] = "piezo_polatis",
    core_device: Annotated[str, _option("--core-device", "Those of the core.  [default: as the others]")] = "",
    agg_switches: Annotated[
        int | None, _option("--agg-switches", "Switches of each PoD.  [default: as few as have the ports]")
    ] = None,
    core_switches: Annotated[
        int | None, _option("--core-switches", "Switches of the core.  [default: as few as have the ports]")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it there, not to standard output.")] = None,
    as_json: JsonFlag = False,
) -> None:
    from orchestrrl.cli.fabric.check import summary
    from orchestrrl.fabric.site import site_document, site_text
    from planner.fabric.generate import regular_site
    from planner.fabric.shape import ImpossibleSite, SiteShape

    with reporting_errors():
        agg, core = _devices(device, core_device)
        try:
            site = regular_site(
                SiteShape(
                    train_pods=train_pods,
                    gen_pods=gen_pods,
                    servers_per_pod=servers_per_pod,
                    gpus_per_server=gpus_per_server,
                    nics_per_server=nics_per_server,
                    rails=rails,
                    servers_per_tor=servers_per_tor,
                    tor_uplinks=tor_uplinks,
                    uplinks_per_pod=uplinks_per_pod,
                    core_lanes=core_lanes,
                    response_lanes=response_lanes,
                    link_gbps=link_gbps,
                    nic_gbps=nic_gbps,
                    agg_device=agg,
                    core_device=core,
                    agg_switches=agg_switches,
                    core_switches=core_switches,
                )
            )
        except ImpossibleSite as error:
            raise ProblemFaults(
                [_with_flags(f"{each.parameter}: {each.message}, got {each.value}") for each in error.faults]
            ) from None
    text = json.dumps(site_document(site), indent=1) + "\n" if as_json else site_text(site)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out}: {error.strerror}")
    print_lines([f"{out}: {summary(site)}"])


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
    if faults:
        raise ProblemFaults(faults)
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
