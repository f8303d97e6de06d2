"""`orchestrrl fabric generate`: the file of a regular site, from a few numbers."""

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import JsonFlag, set_signature
from orchestrrl.cli.output import print_view, raise_faults, write_file
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten
from planner.fabric.generate import ImpossibleSite, SiteNumber, SiteShape, regular_site, site_numbers
from planner.fabric.topology import DEVICES, SwitchModel


def generate(
    *,
    device: Annotated[
        str, typer.Option(help="Optical switches: one of table 2's, or NAME:PORTS:RECONFIGURATION_S.")
    ] = "piezo_polatis",
    core_device: Annotated[str, typer.Option(help="Those of the core.  [default: as the others]")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it there, not to standard output.")] = None,
    as_json: JsonFlag = False,
    **sizes: Any,
) -> None:
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

    agg, core = _devices(device, core_device)
    try:
        site = regular_site(SiteShape(**{**sizes, "agg_device": agg, "core_device": core}))
    except ImpossibleSite as error:
        faults = [_with_flags(f"{each.parameter}: {each.message}, got {each.value}") for each in error.faults]
        raise ProblemFaults(faults) from None
    text = json.dumps(site_document(site), indent=1) + "\n" if as_json else site_text(site)
    if out is not None:
        write_file(out, text)
    print_view(text if out is None else [f"{out}: {summary(site)}"])


def _with_flags(message: str) -> str:
    """Parameters as they are named on the command line."""
    names = "|".join(SiteShape.__dataclass_fields__)
    flagged = re.sub(rf"\b({names})\b", lambda name: f"--{name[0].replace('_', '-')}", message)
    return flagged.replace("--agg-device", "--device")


def _devices(agg: str, core: str) -> tuple[SwitchModel, SwitchModel]:
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


def _device(text: str) -> SwitchModel:
    from pydantic import TypeAdapter, ValidationError

    from orchestrrl.fabric.site_parts import DevicePart, Id

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


def _option(name: str, kind: Any, number: SiteNumber) -> inspect.Parameter:
    usual = f"  [default: {number.usual}]" if number.usual else ""
    default = SiteShape.__dataclass_fields__[name].default
    annotation = Annotated[kind, typer.Option(help=number.text + usual)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_own = [each for each in inspect.signature(generate).parameters.values() if each.kind is each.KEYWORD_ONLY]
set_signature(generate, [*(_option(name, *each) for name, each in site_numbers().items()), *_own])
