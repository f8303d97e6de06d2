"""Charts as inline SVG: axes, lines, bars, marks. Colours are classes of style.py, so that a page's theme applies; what
a shape stands for is its <title>. Pure: same figures, same bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 720.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 16.0, 14.0, 46.0
COLOURS = 8  # classes c0 ... of style.py
TICKS = 6


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
class Scale:
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
            return [10.0**power for power in range(ceil(log10(self.low)), floor(log10(self.high)) + 1)]
        step = _step((self.high - self.low) / TICKS)
        return [step * count for count in range(ceil(self.low / step), floor(self.high / step + 1e-9) + 1)]


def _step(wish: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(wish)) if wish > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wish * 0.999)


def upwards(most: float, height: float = HEIGHT) -> Scale:
    """From 0, with a little room above."""
    return Scale(0.0, most * 1.05 if most > 0 else 1.0, height - BOTTOM, TOP)


def rightwards(most: float, *, least: float = 0.0, is_log: bool = False) -> Scale:
    return Scale(least, most if most > least else least + 1.0, LEFT, WIDTH - RIGHT, is_log)


def logarithmic(least: float, most: float) -> Scale:
    """Whole decades, to the right."""
    low, high = 10.0 ** floor(log10(least)), 10.0 ** ceil(log10(most))
    return Scale(low, high if high > low else 10 * low, LEFT, WIDTH - RIGHT, is_log=True)


@dataclass
class Chart:
    """Elements in the order in which they are painted."""

    title: str
    height: float = HEIGHT
    elements: list[str] = field(default_factory=list)

    def axes(self, x: Scale, y: Scale | None, x_label: str, y_label: str = "") -> None:
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
        self.text((LEFT + WIDTH - RIGHT) / 2, self.height - 8, x_label, "middle", "axis")
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
        """`y`: its upper edge. However short, it is seen."""
        where = f'x="{place(x)}" y="{place(y)}" width="{place(max(width, 0.6))}" height="{place(max(height, 0.6))}"'
        self.elements.append(f'<rect class="fill {colour}" {where}><title>{escape(told)}</title></rect>')

    def line(self, points: Iterable[tuple[float, float]], colour: str, told: str, dashed: bool = False) -> None:
        path = " ".join(f"{place(x)},{place(y)}" for x, y in points)
        kind = f"stroke {colour} dashed" if dashed else f"stroke {colour}"
        self.elements.append(f'<polyline class="{kind}" points="{path}"><title>{escape(told)}</title></polyline>')

    def dot(self, x: float, y: float, colour: str, told: str, ringed: bool = False) -> None:
        kind = f"fill {colour} ringed" if ringed else f"fill {colour}"
        where = f'cx="{place(x)}" cy="{place(y)}" r="{6 if ringed else 4.5}"'
        self.elements.append(f'<circle class="{kind}" {where}><title>{escape(told)}</title></circle>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {place(WIDTH)} {place(self.height)}"'
        head = f'<svg {size} role="img" aria-label="{escape(self.title, quote=True)}">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.elements, "</svg>"])


def stairs(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Values that stay until the next point."""
    drawn: list[tuple[float, float]] = []
    for at, value in points:
        if drawn:
            drawn.append((x.at(at), drawn[-1][1]))
        drawn.append((x.at(at), y.at(value)))
    return drawn


def colour(index: int) -> str:
    return f"c{index % COLOURS}"


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Of (colour, name)."""
    entries = "".join(f'<li><span class="key {kind}"></span>{escape(name)}</li>' for kind, name in names)
    return f'<ul class="legend">{entries}</ul>'


def figure(chart: Chart, caption: str = "", keys: Sequence[tuple[str, str]] = ()) -> str:
    """Wider than a phone, it is moved sideways: letters stay legible."""
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure>{legend(keys) if keys else ""}<div class="wide">{chart.svg()}</div>{told}</figure>'
