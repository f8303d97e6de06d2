"""A site as an SVG picture: switches are bars, fibres cross them upright, a disc says how many end there.

PoDs stand side by side below the core. Pure: the same site is the same picture, byte for byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from orchestrrl.fabric.views import SiteLayer, SwitchColumn, grouped, views
from planner.fabric.topology import PodRole, Site

MOST_COLUMNS = 40  # of all PoDs together; beyond that, PoDs that are alike are drawn once

_STEP = 46  # between columns
_BAR = 34  # between switches
_MARGIN = 24
_PAD = 18  # inside a box
_LABEL = 84  # least room for a switch's name, left of its bar
_DECK = 6  # how far the boxes of alike PoDs stand out
_TITLE = 60  # above everything else
_HEAD_CORE = 26  # above its bars
_HEAD = 52
_BELOW = 110  # ToRs and servers
_INK, _PAPER, _FAINT = "#22303c", "#ffffff", "#8896a3"
_FILL = {PodRole.TRAIN: "#eaf1fa", PodRole.GEN: "#edf6ec", None: "#f3f0f8"}
_LINE = {PodRole.TRAIN: "#2f6db3", PodRole.GEN: "#3c8a4e", None: "#6d55a3"}


@dataclass
class _Sheet:
    """Elements in the order in which they are painted."""

    elements: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: float = 8) -> None:
        self._add("rect", x=x, y=y, width=width, height=height, rx=radius, fill=fill, stroke=stroke)

    def line(self, x: float, y: float, x2: float, y2: float, stroke: str, width: float = 1.5) -> None:
        self._add("line", x1=x, y1=y, x2=x2, y2=y2, stroke=stroke, stroke_width=width)

    def disc(self, x: float, y: float, stroke: str, text: str) -> None:
        self._add("circle", cx=x, cy=y, r=11, fill=_PAPER, stroke=stroke, stroke_width=1.5)
        self.text(x, y + 4, text, size=11 if len(text) < 3 else 9)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        anchor: str = "middle",
        fill: str = _INK,
        bold: bool = False,
    ) -> None:
        weight = {"font_weight": "bold"} if bold else {}
        self._add("text", text, x=x, y=y, font_size=size, text_anchor=anchor, fill=fill, **weight)

    def svg(self, width: float, height: float) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
                f' viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif">',
                f'<rect width="{width:g}" height="{height:g}" fill="{_PAPER}"/>',
                *self.elements,
                "</svg>\n",
            ]
        )

    def _add(self, tag: str, inner: str = "", **attributes: object) -> None:
        words = " ".join(
            f"{name.replace('_', '-')}={quoteattr(f'{value:g}' if isinstance(value, float) else str(value))}"
            for name, value in attributes.items()
        )
        self.elements.append(f"<{tag} {words}>{escape(inner)}</{tag}>" if inner else f"<{tag} {words}/>")


def site_svg(site: Site) -> str:
    core, layers = views(site)
    if sum(len(layer.columns) for layer in layers) > MOST_COLUMNS:
        layers = grouped(site, layers)
    sheet = _Sheet()
    width = 2 * _MARGIN + sum(map(_width, layers)) + _MARGIN * (len(layers) - 1)
    pods_top = _TITLE + (0 if core is None else _core_height(core) + _MARGIN + 8)
    height = pods_top + max(map(_pod_height, layers)) + _MARGIN + _DECK
    title = f"{len(site.server_of):,} GPUs in {len(site.pods):,} PoDs"
    sheet.text(_MARGIN, 28, title, size=16, anchor="start", bold=True)
    rates = f"NICs of {site.nic_gbps:g} Gbps, circuits of {site.link_gbps:g} Gbps; in discs: fibres of one endpoint"
    sheet.text(_MARGIN, 44, rates, size=11, anchor="start", fill=_FAINT)
    if core is not None:
        sheet.box(_MARGIN, _TITLE, width - 2 * _MARGIN, _core_height(core), _FILL[None], _LINE[None])
        sheet.text(_MARGIN + _PAD, _TITLE + 20, f"core, {core.lanes:,} lanes", anchor="start", bold=True)
        _bars(sheet, core, _MARGIN, _TITLE + _HEAD_CORE, width - 2 * _MARGIN)
    x = float(_MARGIN)
    for layer in layers:
        _pod(sheet, layer, x, pods_top, core)
        x += _width(layer) + _MARGIN
    return sheet.svg(width, height)


def _label(layer: SiteLayer) -> float:
    """Room for the longest name of a switch."""
    return max(_LABEL, 16 + 7 * max((len(row.label) for row in layer.rows), default=0))


def _width(layer: SiteLayer) -> float:
    return 2 * _PAD + _label(layer) + _STEP * len(layer.columns)


def _core_height(core: SiteLayer) -> float:
    return _HEAD_CORE + _BAR * len(core.rows) + _PAD / 2


def _pod_height(layer: SiteLayer) -> float:
    return _HEAD + _BAR * len(layer.rows) + _BELOW


def _bars(sheet: _Sheet, layer: SiteLayer, x: float, top: float, width: float) -> None:
    """The switches of a layer, with their names."""
    for place, row in enumerate(layer.rows):
        y = top + _BAR * (place + 0.5)
        left = x + _PAD + _label(layer)
        sheet.text(left - 10, y, row.label, size=11, anchor="end", bold=True)
        kept = f", {row.reserved} kept" if row.reserved else ""
        sheet.text(left - 10, y + 11, f"{row.fibred}/{row.device.ports}{kept}", size=9, anchor="end", fill=_FAINT)
        sheet.box(left - 4, y - 5, width - _label(layer) - 2 * _PAD + 8, 10, _PAPER, _LINE[layer.role], radius=5)


def _pod(sheet: _Sheet, layer: SiteLayer, x: float, top: float, core: SiteLayer | None) -> None:
    width, height, colour = _width(layer), _pod_height(layer), _LINE[layer.role]
    for step in range(min(2, len(layer.pods) - 1), -1, -1):
        sheet.box(x + step * _DECK, top + step * _DECK, width, height, _FILL[layer.role], colour)
    sheet.text(x + _PAD, top + 20, layer.title, size=13, anchor="start", bold=True)
    each = " each" if len(layer.pods) > 1 else ""
    sheet.text(x + _PAD, top + 35, f"{layer.role}, {layer.servers} servers{each}", size=11, anchor="start")
    bars_top = top + _HEAD
    _bars(sheet, layer, x, bars_top, width)
    tors_top = bars_top + _BAR * len(layer.rows) + 14
    for place, column in enumerate(layer.columns):
        middle = x + _PAD + _label(layer) + _STEP * (place + 0.5)
        ys = [bars_top + _BAR * (row + 0.5) for row in range(len(layer.rows))]
        if column.uplink:
            _uplink(sheet, column, middle, top, ys, core)
        else:
            _tor(sheet, column, middle, tors_top, ys, colour)
    tors = sum(not column.uplink for column in layer.columns)
    if tors:
        left = x + _PAD + _label(layer)
        sheet.box(left + 2, tors_top + 52, _STEP * tors - 4, 24, _PAPER, _FAINT, radius=4)
        sheet.text(left + _STEP * tors / 2, tors_top + 68, _servers(layer, _STEP * tors), size=10)
        sheet.text(left - 10, tors_top + 16, "ToR", size=11, anchor="end")
        sheet.text(left - 10, tors_top + 42, "NICs", size=11, anchor="end")


def _servers(layer: SiteLayer, width: float) -> str:
    """As much as fits."""
    text = f"GPUs {layer.gpus}"
    return text if 6 * len(text) < width else f"{layer.servers} servers"


def _tor(sheet: _Sheet, column: SwitchColumn, x: float, top: float, bars: Sequence[float], colour: str) -> None:
    ends = [(y, fibres) for y, fibres in zip(bars, column.fibres, strict=True) if fibres]
    if ends:
        sheet.line(x, top, x, ends[0][0], colour, width=2)
    for y, fibres in ends:
        sheet.disc(x, y, colour, str(fibres))
    sheet.line(x, top + 24, x, top + 52, _FAINT)
    sheet.box(x - _STEP / 2 + 3, top, _STEP - 6, 24, _PAPER, _INK, radius=4)
    sheet.text(x, top + 16, _short(column), size=10)
    sheet.text(x + 4, top + 42, str(column.nics), size=10, anchor="start", fill=_FAINT)


def _uplink(
    sheet: _Sheet, column: SwitchColumn, x: float, top: float, bars: Sequence[float], core: SiteLayer | None
) -> None:
    """From the switches of its PoD to those of the core."""
    colour = _LINE[None]
    ends = [(y, fibres) for y, fibres in zip(bars, column.fibres, strict=True) if fibres]
    above = _TITLE + _HEAD_CORE
    ends += [(above + _BAR * (row + 0.5), fibres) for row, fibres in enumerate(column.core_fibres) if fibres]
    if core is not None and ends:
        sheet.line(x, max(y for y, _ in ends), x, min(y for y, _ in ends), colour, width=3)
    for y, fibres in ends:
        sheet.disc(x, y, colour, str(fibres))
    sheet.box(x - _STEP / 2 + 2, top + 12, _STEP - 4, 24, _PAPER, colour, radius=12)
    sheet.text(x, top + 28, _short(column), size=10)


def _short(column: SwitchColumn) -> str:
    """What fits into a chip."""
    if column.count > 1:
        return f"{column.count} ToRs" if not column.uplink else f"{column.count} up"
    return column.label if len(column.label) <= 7 else f"…{column.label[-6:]}"
