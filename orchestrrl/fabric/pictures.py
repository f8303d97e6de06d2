"""Draw a site. Switches are horizontal lines and endpoints are vertical lines. A disc where two lines cross shows the
number of fibres between the switch and the endpoint.

PoDs are placed next to each other below the core. The same site always yields an identical picture.
"""

from typing import TYPE_CHECKING, Any

from orchestrrl.core.charts import empty_figure, literal
from orchestrrl.fabric.views import SiteLayer, SwitchColumn, SwitchRow, grouped, views
from planner.fabric.topology import PodRole, Site

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLUMNS = 40  # over all PoDs; above this, identical PoDs are drawn once
COLUMN_IN, ROW_IN = 0.5, 0.42  # inches between endpoints, and between switches
LETTERS = 7  # width of the labels that fit between two endpoints
NAMES_IN, TEXT_IN = 1.3, 1.1  # inches next to a layer for switch names, and above and below it
COLOURS = {PodRole.TRAIN: "#2f6db3", PodRole.GEN: "#3c8a4e", None: "#6d55a3"}
BACKGROUNDS = {PodRole.TRAIN: "#eaf1fa", PodRole.GEN: "#edf6ec", None: "#f3f0f8"}


def site_figure(site: Site) -> "Figure":
    core, pods = views(site)
    if sum(len(layer.columns) for layer in pods) > MOST_COLUMNS:
        pods = grouped(site, pods)
    columns = [len(layer.columns) for layer in pods]
    rows = [0 if core is None else len(core.rows) + 1, max(len(layer.rows) for layer in pods) + 1]
    decks = [row for row in rows if row]
    width = max(6.0, NAMES_IN * len(pods) + COLUMN_IN * sum(columns))
    figure = empty_figure(width, ROW_IN * sum(decks) + TEXT_IN * len(decks) + 0.6)
    grid = figure.add_gridspec(len(decks), len(pods), width_ratios=columns, height_ratios=decks)
    if core is not None:
        _draw_layer(figure.add_subplot(grid[0, :]), core, rows[0])
    for place, layer in enumerate(pods):
        _draw_layer(figure.add_subplot(grid[-1, place]), layer, rows[1])
    rates = f"NICs of {site.nic_gbps:g} Gbps, circuits of {site.link_gbps:g} Gbps; in discs: fibres of one endpoint"
    title = f"{len(site.server_of):,} GPUs in {len(site.pods):,} PoDs\n{rates}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _draw_layer(axis: "Axes", layer: SiteLayer, rows: int) -> None:
    """Draw one layer in an area with a height of `rows` rows. Each switch occupies one row, and the upper ends of
    uplinks occupy another row."""
    colour, last = COLOURS[layer.role], len(layer.columns) - 0.5
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    box = {"facecolor": "white", "edgecolor": colour}
    axis.hlines(range(len(layer.rows)), -0.5, last, color=colour, linewidth=5, alpha=0.35)
    for place, column in enumerate(layer.columns):
        ends = [row for row, fibres in enumerate(column.fibres) if fibres]
        goes_up = column.uplink and layer.role is not None
        above, below = (-0.8, max(ends, default=0)) if goes_up else (min(ends, default=rows), rows - 0.6)
        axis.vlines(place, above, below, color=COLOURS[None] if column.uplink else colour, linewidth=2)
        for row in ends:
            axis.text(place, row, str(column.fibres[row]), bbox={"boxstyle": "circle", **box}, **text)
        if goes_up:
            axis.text(place, -0.8, _short(column), bbox={"boxstyle": "round", **box}, **text)
    ends_below = [place for place, column in enumerate(layer.columns) if layer.role is None or not column.uplink]
    axis.set_xticks(ends_below, [_end_text(layer.columns[place]) for place in ends_below], fontsize=8)
    axis.set_yticks(range(len(layer.rows)), [_switch_text(row) for row in layer.rows], fontsize=8)
    axis.set(xlim=(-0.7, last + 0.2), ylim=(rows - 0.6, -1.1), facecolor=BACKGROUNDS[layer.role])
    each = " each" if len(layer.pods) > 1 else ""
    title = f"{literal(layer.title)}\n{layer.role}, {layer.servers} servers{each}"
    axis.set_title(f"core, {layer.lanes:,} lanes" if layer.role is None else title, loc="left", fontsize=9)
    if ends_below and 0 < len(layer.gpus) < LETTERS * len(layer.columns):
        axis.set_xlabel(f"GPUs {layer.gpus}", fontsize=8)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_color(colour)


def _switch_text(row: SwitchRow) -> str:
    kept = f", {row.reserved} kept" if row.reserved else ""
    return f"{literal(row.label)}\n{row.fibred}/{row.device.ports}{kept}"


def _end_text(column: SwitchColumn) -> str:
    return _short(column) if column.uplink else f"{_short(column)}\n{column.nics} NICs"


def _short(column: SwitchColumn) -> str:
    """Return a label for a column that fits into the column's width."""
    if column.count > 1:
        return f"{column.count} ToRs" if not column.uplink else f"{column.count} up"
    return literal(column.label if len(column.label) <= LETTERS else f"…{column.label[-6:]}")
