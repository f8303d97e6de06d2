"""Draw charts (bars, step functions) and write them to files. Identical data produces identical files. Matplotlib draws
without a display, and is imported when the first figure is drawn."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_STYLES = ("-", "--", ":", "-.", (0, (9, 2, 2, 2)), (0, (12, 4)), (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2)))
SHORTEST = 0.002  # of a chart's range: shorter bars are widened, so that they stay visible
NAME_LETTERS = 40  # longer row names are wrapped
EDGE = "#8896a3"
LEGEND_LETTERS = 110  # per row of a legend
_NO_DATES = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
_XLINK_HREF = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True, slots=True)
class ChartBar:
    """A horizontal bar from `begin` to `end`. `row` is the vertical position of its middle, and `label` is written
    after its end."""

    row: float
    begin: float
    end: float
    colour: str
    tooltip: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A named step function. `points` are pairs of x and y, and each y holds until the next point."""

    name: str
    points: Sequence[tuple[float, float]]
    tooltip: str = ""


def axes(
    rows: int = 1, columns: int = 1, *, width: float = 9.0, height: float = 4.5, **options: Any
) -> "tuple[Figure, list[list[Axes]]]":
    """Return a figure of `width` by `height` inches, and its axes as a list of rows. `options` are passed to
    matplotlib's `Figure.subplots`."""
    figure = empty_figure(width, height)
    return figure, figure.subplots(rows, columns, squeeze=False, **options).tolist()


def empty_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def literal(text: str) -> str:
    """Escape `text` so that matplotlib shows it unchanged. Without escapes, text between dollar signs is rendered as
    mathematics."""
    return text.replace("$", r"\$")


def save(figure: "Figure", target: Path, *, kind: str = "") -> None:
    """Write the figure to a file. The format is `kind` or, by default, the suffix of the file name. Raises OSError if
    the file cannot be written, and ValueError for an unknown format."""
    from matplotlib import rc_context

    kind = kind or target.suffix.lower().removeprefix(".")
    with rc_context({"svg.hashsalt": "orchestrrl", "svg.fonttype": "none"}):
        figure.savefig(target, format=kind or None, dpi=120, metadata=_NO_DATES.get(kind))


def inline_svg(figure: "Figure", title: str) -> str:
    """Return the figure as an SVG element for an HTML page. `title` is the label of the element. The ids (`gid`) of the
    figure's artists become tooltips."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):  # ids of several elements in a page differ
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_DATES["svg"])
    tooltips = {gid for artist in figure.findobj() if (gid := artist.get_gid())}
    root = ElementTree.fromstring(text.getvalue())
    referenced = set(re.findall(r'[("]#([^)"]+)', text.getvalue()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if (gid := element.get("id")) in tooltips:
            tooltip = ElementTree.Element("title")
            tooltip.text = gid
            element.insert(0, tooltip)
        if gid is not None and gid not in referenced:
            del element.attrib["id"]
        if _XLINK_HREF in element.attrib:
            element.set("href", element.attrib.pop(_XLINK_HREF))
    for unused in root.findall("metadata"):
        root.remove(unused)
    root.attrib |= {"role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def bar_chart(
    bars: Sequence[ChartBar], names: Mapping[float, str], x_label: str, *, until: float | None = None
) -> "Figure":
    """Return a chart of horizontal bars. `names` maps rows to their names, and row 0 is at the top. The horizontal axis
    ends at `until` or, by default, after the last end of a bar."""
    rows = max([*names, *(bar.row for bar in bars)]) + 1
    shortest = SHORTEST * max((bar.end for bar in bars), default=0.0)
    figure, [[axis]] = axes(height=1.2 + 0.3 * rows)
    drawn = axis.barh(
        [bar.row for bar in bars],
        [max(bar.end - bar.begin, shortest) for bar in bars],
        0.7,
        left=[bar.begin for bar in bars],
        color=[bar.colour for bar in bars],
        edgecolor=EDGE,
        linewidth=0.4,
    )
    for patch, bar in zip(drawn, bars, strict=True):
        patch.set_gid(bar.tooltip or None)
    axis.bar_label(drawn, [bar.label for bar in bars], padding=4, fontsize=8)
    axis.set_yticks(list(names), [literal(fill(name, NAME_LETTERS)) for name in names.values()], fontsize=8)
    axis.set_ylim(rows - 0.4, -0.6)
    axis.set_xlim(0, until)
    axis.set_xlabel(x_label)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def add_stairs(axis: "Axes", lines: Iterable[ChartLine]) -> None:
    """Draw each line in a different colour and style. A line without points is omitted, and its colour is not used for
    another line."""
    for place, line in enumerate(lines):
        if line.points:
            axis.step(
                *zip(*line.points, strict=True),
                where="post",
                color=f"C{place % 10}",
                linestyle=LINE_STYLES[place % len(LINE_STYLES)],
                label=literal(line.name),
                gid=line.tooltip or line.name,
            )


def add_legend(figure: "Figure", colours: Mapping[str, str] | None = None) -> None:
    """Add a legend above the axes, and enlarge the figure to make room for it. The legend lists the names in `colours`,
    or the labels of the drawn lines if `colours` is None."""
    from matplotlib.patches import Patch

    if colours is None:
        named = [each for axis in figure.axes for each in axis.get_legend_handles_labels()[0]]
    else:
        named = [Patch(facecolor=colour, edgecolor=EDGE, label=literal(name)) for name, colour in colours.items()]
    if named:
        longest = max(len(str(each.get_label())) for each in named)
        columns = max(1, LEGEND_LETTERS // (longest + 6))
        figure.set_figheight(figure.get_figheight() + 0.18 * ceil(len(named) / columns))
        figure.legend(handles=named, loc="outside upper left", ncols=columns, fontsize=8, frameon=False)
