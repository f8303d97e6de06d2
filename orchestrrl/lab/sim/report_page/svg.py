"""Charts as inline SVG: axes, lines, bars, marks. Colours are classes of style.py, so that a page's theme applies; what
a shape stands for is its <title>. Pure: same figures, same bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 720.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 28.0, 14.0, 46.0
COLOURS = 10  # classes c0 ... of style.py: as many as a training step has parts
DASHES = 8  # classes d0 ...
TICKS = 6
GAP = 1.0  # between two bars in a row, where they are wide enough to lose it
THINNEST = 1.5  # however short a bar is, it is seen
NEAR = 3.0  # dots that lie so close hide each other, unless the one behind is larger


def number(value: float) -> str:
    """For people: four digits, with thousands apart."""
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def place(value: float) -> str:
    """A coordinate."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@dataclass(frozen=True, slots=True)
class AxisScale:
    """From values to coordinates; on a logarithmic one values below `low` lie at its beginning."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = log10(low), log10(high), log10(max(value, low))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.is_log:
            powers = range(floor(log10(self.low)), floor(log10(self.high)) + 1)
            factors = (1, 2, 5) if len(powers) <= 3 else (1,)
            found = [factor * 10.0**power for power in powers for factor in factors]
            return [tick for tick in found if self.low <= tick <= self.high * (1 + 1e-9)]
        step = _step((self.high - self.low) / TICKS)
        return [step * count for count in range(ceil(self.low / step), floor(self.high / step + 1e-9) + 1)]


def _step(wish: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(wish)) if wish > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wish * 0.999)


def upwards(most: float, height: float = HEIGHT) -> AxisScale:
    """From 0, with a little room above."""
    return AxisScale(0.0, most * 1.05 if most > 0 else 1.0, height - BOTTOM, TOP)


def rightwards(most: float, begin: float = LEFT) -> AxisScale:
    """From 0."""
    return AxisScale(0.0, most if most > 0 else 1.0, begin, WIDTH - RIGHT)


def logarithmic(least: float, most: float) -> AxisScale:
    """Whole decades, to the right."""
    low, high = 10.0 ** floor(log10(least)), 10.0 ** ceil(log10(most))
    return AxisScale(low, high if high > low else 10 * low, LEFT, WIDTH - RIGHT, is_log=True)


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    colour: str
    tooltip: str
    ringed: bool = False


@dataclass
class Chart:
    """Elements in the order in which they are painted."""

    title: str
    height: float = HEIGHT
    elements: list[str] = field(default_factory=list)

    def axes(self, x: AxisScale, y: AxisScale | None, x_label: str, y_label: str = "") -> None:
        bottom = self.height - BOTTOM
        for tick in x.ticks():
            at = place(x.at(tick))
            self.elements.append(f'<line class="grid" x1="{at}" y1="{place(TOP)}" x2="{at}" y2="{place(bottom)}"/>')
            self.text(x.at(tick), bottom + 16, number(tick), "middle")
        for tick in y.ticks() if y is not None else ():
            at = place(y.at(tick)) if y is not None else ""
            right = place(WIDTH - RIGHT)
            self.elements.append(f'<line class="grid" x1="{place(LEFT)}" y1="{at}" x2="{right}" y2="{at}"/>')
            self.text(LEFT - 6, float(at) + 4, number(tick), "end")
        self.text((x.begin + x.end) / 2, self.height - 8, x_label, "middle", "axis")
        if y_label:
            middle = (TOP + bottom) / 2
            turned = f'transform="rotate(-90 14 {place(middle)})"'
            self.elements.append(
                f'<text class="axis" x="14" y="{place(middle)}" text-anchor="middle" {turned}>{escape(y_label)}</text>'
            )

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> None:
        where = f'x="{place(x)}" y="{place(y)}" text-anchor="{anchor}"'
        self.elements.append(f'<text class="{kind}" {where}>{escape(text)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, colour: str, told: str) -> None:
        """`y`: its upper edge."""
        seen = max(width - GAP if width > 3 * GAP else width, THINNEST)
        where = f'x="{place(x)}" y="{place(y)}" width="{place(seen)}" height="{place(height)}"'
        self.elements.append(f'<rect class="fill {colour}" {where}><title>{escape(told)}</title></rect>')

    def line(self, points: Iterable[tuple[float, float]], kind: str, told: str) -> None:
        path = " ".join(f"{place(x)},{place(y)}" for x, y in points)
        self.elements.append(
            f'<polyline class="stroke {kind}" points="{path}"><title>{escape(told)}</title></polyline>'
        )

    def dots(self, dots: Sequence["Dot"]) -> None:
        """Those that would be hidden by later ones look out from behind them."""
        for index, dot in enumerate(dots):
            behind = sum(abs(dot.x - each.x) < NEAR and abs(dot.y - each.y) < NEAR for each in dots[index + 1 :])
            kind = f"fill {dot.colour} ringed" if dot.ringed else f"fill {dot.colour}"
            where = f'cx="{place(dot.x)}" cy="{place(dot.y)}" r="{place(5 + 3 * min(behind, 4))}"'
            self.elements.append(f'<circle class="{kind}" {where}><title>{escape(dot.tooltip)}</title></circle>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {place(WIDTH)} {place(self.height)}"'
        head = f'<svg {size} role="img" aria-label="{escape(self.title, quote=True)}">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.elements, "</svg>"])


def stairs(points: Sequence[tuple[float, float]], x: AxisScale, y: AxisScale) -> list[tuple[float, float]]:
    """Values that stay until the next point."""
    drawn: list[tuple[float, float]] = []
    for at, value in points:
        if drawn:
            drawn.append((x.at(at), drawn[-1][1]))
        drawn.append((x.at(at), y.at(value)))
    return drawn


def colour(index: int) -> str:
    return f"c{index % COLOURS}"


def stroke(index: int) -> str:
    """Of a line: a colour, and dashes by which lines are told apart where they lie on each other, or in grey."""
    return f"{colour(index)} d{index % DASHES}"


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Of (colour, name)."""
    entries = "".join(f"<li>{_key(kind)}{escape(name)}</li>" for kind, name in names)
    return f'<ul class="legend">{entries}</ul>'


def _key(kind: str) -> str:
    """A square, or where it has dashes a piece of the line."""
    if " " not in kind:
        return f'<span class="key {kind}"></span>'
    return f'<svg class="key" viewBox="0 0 32 4" aria-hidden="true"><path class="stroke {kind}" d="M0 2H32"/></svg>'


def figure(chart: Chart, caption: str = "", keys: Sequence[tuple[str, str]] = ()) -> str:
    """Wider than a phone, it is moved sideways: letters stay legible."""
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure>{legend(keys) if keys else ""}<div class="wide">{chart.svg()}</div>{told}</figure>'
