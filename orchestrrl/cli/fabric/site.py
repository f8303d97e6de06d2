"""`orchestrrl fabric check`, `show` and `generate`: validate, draw and generate site files."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import JsonFlag, command, set_signature
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import (
    Columns,
    Output,
    View,
    cells_table,
    fields,
    print_view,
    raise_faults,
    row_of,
    write_file,
    writing,
)
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten
from planner.fabric.generate import ImpossibleSite, SiteNumber, SiteShape, regular_site, site_numbers
from planner.fabric.topology import DEVICES, Site, SwitchModel

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrrl.fabric.views import SiteLayer, SwitchColumn, SwitchRow
    from planner.fabric.survey import PodCapacity, SiteSurvey, SwitchPorts

SiteFile = Annotated[Path, typer.Argument(metavar="SITE.yaml", help="The site file.")]

ROWS_SHOWN = 24  # rows of a table; with more, adjacent equal rows are merged
GAP = 3  # blanks between the columns of a drawing


@command
def check(file: SiteFile) -> Output:
    """Validate the cabling of a site and print its capacity. If the cabling is invalid, print all errors.

    Examples of errors are a port that is used twice or does not exist on its switch, a fibre without a far end, an
    unreachable ToR or PoD, a NIC on the wrong rail, and a GPU in two servers. Each error is printed on one line, and
    the exit status is 2. For a valid site, the command prints the capacities, the oversubscription of ToRs and uplinks,
    the spare ports, and warnings.

    Example:

        orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

        orchestrrl fabric check site.yaml
    """
    from orchestrrl.fabric.site import read_site
    from planner.fabric.survey import survey

    site = read_site(file)
    found = survey(site)
    return Output(_survey_json(site, found), _check_view(file, site, found))


def _check_view(file: Path, site: "Site", found: "SiteSurvey") -> View:
    yield f"{file}: valid"
    yield summary(site)
    yield _grouped("PoDs, Tbps per direction (in brackets: oversubscription)", POD_COLUMNS, found.pods)
    yield _grouped("Switches", SWITCH_COLUMNS, found.switches)
    yield from (f"warning: {warning}" for warning in found.warnings)


def summary(site: "Site") -> str:
    roles = " and ".join(
        f"{number} {role}" for role in ("train", "gen") if (number := sum(pod.role == role for pod in site.pods))
    )
    return (
        f"{roles} PoDs with {len(site.servers):,} servers and {len(site.server_of):,} GPUs;"
        f" NICs of {site.nic_gbps:g} Gbps, circuits of {site.link_gbps:g} Gbps"
    )


def _tbps(gbps: float) -> str:
    return f"{gbps / 1000:.4g}"


def _up(capacity_gbps: float, ratio: float | None) -> str:
    """Format an upward capacity in Tbps, with its oversubscription if `ratio` is not None, such as `6.4 (2:1)`."""
    return _tbps(capacity_gbps) + ("" if ratio is None else f" ({ratio:.3g}:1)")


POD_COLUMNS: Columns = {
    "PoD": lambda each: each.pod.id,
    "role": lambda each: each.pod.role,
    "servers": "servers",
    "GPUs": "gpus",
    "ToRs": "tors",
    "lanes": "lanes",
    "hosts": lambda each: _tbps(each.hosts_gbps),
    "ToRs up": lambda each: _up(each.tors_gbps, each.tor_ratio),
    "lanes up": lambda each: _up(each.uplinks_gbps, each.uplink_ratio),
}
SWITCH_COLUMNS: Columns = {
    "switch": lambda each: each.switch.id,
    "tier": lambda each: each.switch.tier,
    "device": lambda each: each.switch.device.name,
    "moves in": lambda each: duration(each.switch.device.reconfiguration_s),
    "ports": lambda each: each.switch.device.ports,
    "reserved": "reserved",
    "spare": "spare",
}


def _grouped(title: str, columns: Columns, each: "Iterable[PodCapacity | SwitchPorts]") -> "Table":
    """Return a table with a row for each item of `each`. If there are more than `ROWS_SHOWN` items, adjacent rows that
    differ only in the name are merged."""
    from orchestrrl.fabric.views import named

    rows: Sequence[tuple[object, ...]] = [row_of(one, columns) for one in each]
    if len(rows) > ROWS_SHOWN:
        alike = groupby(rows, key=lambda row: row[1:])
        rows = [(named([str(row[0]) for row in group]), *rest) for rest, group in alike]
    return cells_table(title, tuple(columns), rows)


def _survey_json(site: "Site", found: "SiteSurvey") -> dict[str, Any]:
    of_pod = "servers gpus tors uplinks lanes hosts_gbps tors_gbps uplinks_gbps"
    ratios = {"tor_oversubscription": "tor_ratio", "uplink_oversubscription": "uplink_ratio"}
    return {
        **fields(site, "link_gbps nic_gbps"),
        "servers": len(site.servers),
        "gpus": len(site.server_of),
        "pods": [fields(each.pod, "id role") | fields(each, of_pod, **ratios) for each in found.pods],
        "switches": [
            {
                **fields(each.switch, "id tier"),
                **fields(each.switch.device, "reconfiguration_s ports", device="name"),
                **fields(each, "fibred reserved spare"),
            }
            for each in found.switches
        ],
        "warnings": list(found.warnings),
    }


# --- drawing


@command
def show(
    file: SiteFile, svg: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Also draw to this file.")] = None
) -> Output:
    """Draw how servers connect to ToRs, ToRs and uplinks to the switches of their PoD, and uplinks to the core.

    Each switch is drawn as a horizontal line with the number of fibres of each endpoint. Identical parts are drawn
    once.

    Example:

        orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

        orchestrrl fabric show site.yaml --svg site.svg
    """
    from orchestrrl.core.charts import save
    from orchestrrl.fabric.pictures import site_figure
    from orchestrrl.fabric.site import read_site
    from orchestrrl.fabric.views import grouped, views

    site = read_site(file)
    core, each_pod = views(site)
    pods = grouped(site, each_pod)
    if svg is not None:
        with writing(svg):
            save(site_figure(site), svg, kind="svg")
    document = {"core": None if core is None else _layer_json(core), "pods": [_layer_json(layer) for layer in pods]}
    lines = [summary(site)]
    for layer in (*([core] if core else []), *pods):
        lines += ["", *drawing(layer)]
    return Output(document, "".join(f"{line.rstrip()}\n" for line in lines))


def drawing(layer: "SiteLayer") -> Iterator[str]:
    """Yield the lines of a text drawing of the core or of identical PoDs."""
    label = max(len(name) for name in (*(row.label for row in layer.rows), "servers", "uplinks")) + 1
    names = [_name(layer, column) for column in layer.columns]
    widths = [
        max(map(len, (name, *map(str, column.fibres)))) for name, column in zip(names, layer.columns, strict=True)
    ]
    yield _heading(layer)
    yield ""

    def line(name: str, cells: Sequence[str], fill: str = " ") -> str:
        row = f"  {name} ".ljust(label + 3, fill)
        for cell, width in zip(cells, widths, strict=True):
            padded = f" {cell} " if fill != " " and cell.strip(fill) else cell
            row += fill * GAP + padded.center(width + 2, fill)
        return row

    if layer.role is not None:
        if any(column.rail is not None for column in layer.columns):
            yield line("rail", ["" if column.rail is None else str(column.rail) for column in layer.columns])
        yield line("NICs", [str(column.nics) if not column.uplink else "core" for column in layer.columns])
        yield line("", ["│" if not column.uplink else "║" for column in layer.columns])
    yield line("", names)
    yield line("", ["║"] * len(layer.columns))
    for place, row in enumerate(layer.rows):
        cells = [str(column.fibres[place]) if column.fibres[place] else "═" for column in layer.columns]
        yield f"{line(row.label, cells, '═')}═   {_ports(row)}"


def _name(layer: "SiteLayer", column: "SwitchColumn") -> str:
    """Return the label of a column of a drawing. In a drawing of PoDs, a column that represents several endpoints is
    labelled with their number and kind, such as `4 ToRs`."""
    if layer.role is None or column.count == 1:
        return column.label
    return f"{column.count} {'uplinks' if column.uplink else 'ToRs'}"


def _heading(layer: "SiteLayer") -> str:
    if layer.role is None:
        uplinks = sum(column.count for column in layer.columns)
        return f"core: {uplinks:,} uplinks with {layer.lanes:,} lanes"
    each = " each" if len(layer.pods) > 1 else ""
    lanes = f"{layer.lanes:,} lanes to the core{each}" if layer.lanes else "no core"
    return f"{layer.title} ({layer.role}): {layer.servers} servers{each}, GPUs {layer.gpus}, {lanes}"


def _ports(row: "SwitchRow") -> str:
    kept = f", {row.reserved} reserved" if row.reserved else ""
    each = " each" if row.count > 1 else ""
    device = f"{row.device.name}, {duration(row.device.reconfiguration_s)}"
    return f"{row.fibred} of {row.device.ports} ports{each}{kept} ({device})"


def _layer_json(layer: "SiteLayer") -> dict[str, Any]:
    return {
        "pods": list(layer.pods),
        **fields(layer, "role servers gpus lanes"),
        "endpoints": [
            {
                **fields(column, "label count"),
                "kind": "uplink" if column.uplink else "tor",
                **fields(column, "rail nics"),
                "fibres": list(column.fibres),
            }
            for column in layer.columns
        ],
        "switches": [
            fields(row, "label count") | fields(row.device, "ports", device="name") | fields(row, "fibred reserved")
            for row in layer.rows
        ],
    }


# --- generation of a regular site


def generate(
    *,
    device: Annotated[
        str, typer.Option(help="Optical switch model: one of the paper's table 2, or NAME:PORTS:RECONFIGURATION_S.")
    ] = "piezo_polatis",
    core_device: Annotated[str, typer.Option(help="Switch model of the core.  [default: --device]")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file.  [default: standard output]")] = None,
    as_json: JsonFlag = False,
    **sizes: Any,
) -> None:
    """Generate the site file of a regular site with rail-aligned PoDs.

    Each ToR and uplink has fibres to every switch of its PoD, and each uplink also has fibres to every switch of the
    core. Some of the lanes to the core are reserved for the responses of generation engines. The defaults are those of
    the paper's simulations: servers of 8 GPUs and 8 NICs of 200 Gbps, and Polatis switches. With these defaults, ToRs
    have the same capacity up and down, and the uplinks of a PoD have half the capacity of its servers. The minimum
    number of switches is used. For an impossible combination, the command prints the options to change and exits with
    status 2.

    Example:

        orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

        orchestrrl fabric generate --train-pods 24 --gen-pods 40 --servers-per-pod 32 --core-device mems_3d_calient
    """
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
    """Return the message with the names of site parameters replaced by command-line flags."""
    names = "|".join(SiteShape.__dataclass_fields__)
    flagged = re.sub(rf"\b({names})\b", lambda name: f"--{name[0].replace('_', '-')}", message)
    return flagged.replace("--agg-device", "--device")


def _devices(agg: str, core: str) -> tuple[SwitchModel, SwitchModel]:
    """Return the switch models of the PoDs and of the core. `agg` and `core` are the values of `--device` and
    `--core-device`. Raises ProblemFaults with all errors if a value is invalid."""
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
        raise ValueError(f"must be one of {', '.join(DEVICES)}, or NAME:PORTS:RECONFIGURATION_S")
    if name in DEVICES:
        raise ValueError(
            f"must not have the name {name}, which is the name of a known device with {DEVICES[name].ports} ports"
        )
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
