"""`orchestrrl fabric show`: a site drawn as text, and as a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.fabric.check import SiteFile, summary
from orchestrrl.cli.formats import duration
from orchestrrl.cli.output import Output, fail, fields

if TYPE_CHECKING:
    from orchestrrl.fabric.views import SiteLayer, SwitchColumn, SwitchRow

GAP = 3  # blanks between columns


@command
def show(
    file: SiteFile, svg: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Write a picture as well.")] = None
) -> Output:
    """Draw a site: servers on ToRs, ToRs and uplinks on the switches of their PoD, uplinks on the core.

    A switch is a line across; where an endpoint's fibres end on it, it says how many. What is alike is drawn once.

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
        try:
            save(site_figure(site), svg, kind="svg")
        except OSError as error:
            fail(f"{svg}: {error.strerror}")
    document = {"core": None if core is None else _json(core), "pods": [_json(layer) for layer in pods]}
    lines = [summary(site)]
    for layer in (*([core] if core else []), *pods):
        lines += ["", *drawing(layer)]
    return Output(document, "".join(f"{line.rstrip()}\n" for line in lines))


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
