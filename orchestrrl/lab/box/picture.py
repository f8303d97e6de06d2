"""A cycle as a picture: what went between ToRs, moment by moment, and when circuits changed."""

from pathlib import Path
from typing import Any

from orchestrrl.core.charts import axes, save

COLOURS = {"train": "#eaf1fa", "gen": "#edf6ec", "weight_sync": "#f3f0f8"}


def draw_cycle(cycle: dict[str, Any], path: Path) -> None:
    figure, [[line], [bars]] = axes(2, 1, width=10, height=5.6, height_ratios=(3, 2))
    stages = cycle["stages"]
    top = max((rate for _, rate in cycle["timeline"]), default=1.0) * 1.15
    for stage in stages:
        line.axvspan(stage["from_s"], stage["until_s"], color=COLOURS[stage["stage"]])
        line.text((stage["from_s"] + stage["until_s"]) / 2, top * 0.94, stage["period"], ha="center", fontsize=9)
        for since_s, until_s in stage["commits"]:
            line.axvspan(since_s, until_s, color="#c0392b", alpha=0.6)
    line.plot(*zip(*cycle["timeline"], strict=True), color="#22303c", linewidth=1)
    line.set_xlim(0, cycle["timeline"][-1][0])
    line.set_ylim(0, top)
    line.set_ylabel("Mbit/s between ToRs")
    line.set_xlabel("seconds; in red: circuits change, from the order until packets take them")
    places = range(len(stages))
    for offset, name, words, colour in (
        (-0.2, "before_mbps", "before", "#8896a3"),
        (0.2, "mbps", "on its circuits", "#2f6db3"),
    ):
        values = [stage[name] or 0.0 for stage in stages]
        drawn = bars.bar([place + offset for place in places], values, 0.38, color=colour, label=words)
        bars.bar_label(drawn, fmt="%.0f", fontsize=8)
    bars.set_xticks(list(places), [stage["period"] for stage in stages])
    bars.set_ylabel("Mbit/s, mean")
    bars.margins(y=0.2)
    bars.legend(fontsize=8)
    save(figure, path)
