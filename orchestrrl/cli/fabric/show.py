"""`orchestrrl fabric show`: a site drawn as text, and as a picture."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.fabric.check import SiteFile, summary
from orchestrrl.cli.formats import duration
from orchestrrl.cli.groups import group
from orchestrrl.cli.output import JsonFlag, fail, print_json, reporting_errors

if TYPE_CHECKING:
    from orchestrrl.fabric.views import SiteLayer, SwitchColumn, SwitchRow

GAP = 3  # blanks between columns

HELP = """Draw a site: servers on ToRs, ToRs and uplinks on the switches of their PoD, uplinks on the core.

A switch is a line across; where an endpoint's fibres end on it, it says how many. What is alike is drawn once.

Example:

    orchestrrl fabric generate --train-pods 2 --gen-pods 4 -o site.yaml

    orchestrrl fabric show site.yaml --svg site.svg
"""


def register(app: typer.Typer) -> None:
    group(app, "fabric").command("show", help=HELP)(show)


def show(
    file: SiteFile,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="OUT.svg", help="Write a picture as well.")] = None,
    as_json: JsonFlag = False,
) -> None:
    from orchestrrl.core.charts import save
    from orchestrrl.fabric.pictures import site_figure
    from orchestrrl.fabric.site import read_site
    from orchestrrl.fabric.views import grouped, views

    with reporting_errors():
        site = read_site(file)
    core, each_pod = views(site)
    pods = grouped(site, each_pod)
    if svg is not None:
        try:
            save(site_figure(site), svg, kind="svg")
        except OSError as error:
            fail(f"{svg}: {error.strerror}")
    if as_json:
        print_json({"core": None if core is None else _json(core), "pods": [_json(layer) for layer in pods]})
        return
    lines = [summary(site)]
    for layer in (*([core] if core else []), *pods):
        lines += ["", *drawing(layer)]
    sys.stdout.write("\n".join(line.rstrip() for line in lines) + "\n")


def drawing(layer: "SiteLayer") -> Iterator[str]:
    """A layer as lines of text."""
    label = max(len(name) for name in (*(row.label for row in layer.rows), "servers", "uplinks")) + 1
    names = [_name(layer, column) for column in layer.columns]
    widths = [max(len(name), _most_digits(column)) for name, column in zip(names, layer.columns, strict=True)]
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
    """PoDs in the core are named; of a PoD's own endpoints that share a column their number is enough."""
    if layer.role is None or column.count == 1:
        return column.label
    return f"{column.count} {'uplinks' if column.uplink else 'ToRs'}"


def _most_digits(column: "SwitchColumn") -> int:
    return max((len(str(count)) for count in column.fibres), default=1)


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


def _json(layer: "SiteLayer") -> dict[str, Any]:
    return {
        "pods": list(layer.pods),
        "role": layer.role,
        "servers": layer.servers,
        "gpus": layer.gpus,
        "lanes": layer.lanes,
        "endpoints": [
            {
                "label": column.label,
                "count": column.count,
                "kind": "uplink" if column.uplink else "tor",
                "rail": column.rail,
                "nics": column.nics,
                "fibres": list(column.fibres),
            }
            for column in layer.columns
        ],
        "switches": [
            {
                "label": row.label,
                "count": row.count,
                "device": row.device.name,
                "ports": row.device.ports,
                "fibred": row.fibred,
                "reserved": row.reserved,
            }
            for row in layer.rows
        ],
    }
