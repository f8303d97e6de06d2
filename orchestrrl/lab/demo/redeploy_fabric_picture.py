"""Circuits between the ToRs that generate, before a step and after it: as thick as there are many."""

from collections.abc import Iterator
from math import cos, pi, sin
from typing import TYPE_CHECKING, Any

from orchestrrl.lab.demo.redeploy_fabric import GEN_POD, ObservedFabric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center"}
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_APART = 3.4  # between the middles of the two circles


def draw_circuits(axis: "Axes", before: ObservedFabric | None, after: ObservedFabric | None) -> None:
    """Two circles of ToRs, left and right."""
    axis.set_axis_off()
    axis.set_aspect("equal")
    axis.set_xlim(-1.6, _APART + 1.6)
    axis.set_ylim(-1.5, 1.5)
    sides = [fabric.circuits.of(GEN_POD) for fabric in (before, after) if fabric is not None]
    tors = sorted({end for side in sides for pair in side for end in pair if "/up" not in end})
    for middle, words, side in zip((0.0, _APART), ("before", "after"), sides, strict=False):
        places = dict(zip(tors, _circle(len(tors), middle), strict=True))
        for (a, b), count in side.items():
            if a in places and b in places:
                (x, y), (to_x, to_y) = places[a], places[b]
                axis.plot([x, to_x], [y, to_y], color="#2ca02c", linewidth=1.5 * count, solid_capstyle="round")
                axis.text((2 * x + to_x) / 3, (2 * y + to_y) / 3, str(count), bbox=_WHITE, **_TEXT)
        for tor, (x, y) in places.items():
            axis.plot([x], [y], marker="s", markersize=9, color="#1f77b4")
            axis.text(x, y + (0.22 if y > 0 else -0.22), tor.removeprefix(f"{GEN_POD}/"), **_TEXT)
        axis.text(middle, -1.45, f"circuits {words}", fontsize=9, ha="center")


def _circle(count: int, middle: float) -> Iterator[tuple[float, float]]:
    for number in range(count):
        angle = pi * (0.75 - 2 * number / count)
        yield middle + cos(angle), sin(angle)
