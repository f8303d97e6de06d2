"""Run a box from outside its namespaces: define its parameters, start its process, and plot its results."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from orchestrrl.core.charts import axes, save
from orchestrrl.lab.box import enter

# In the order in which they run.
SHOWS = ("circuits", "cycle", "transition", "failed_port", "wrong_cable")
# Broadcast methods that "weights" compares, see weights.py.
SYNC_WAYS = ("tree", "two_stage", "naive")
# The default protocols, assigned to the switches in rotation, in the order of the site file.
PROTOCOLS = ("scpi", "tl1-polatis", "restconf")
_FILES = files("orchestrrl.lab.box")
SITE = _FILES.joinpath("site.yaml").read_text("utf-8")  # the default: two PoDs, four ToRs, three optical switches


def weights_site(circuit_mbps: float) -> str:
    """Return the text of the default site file of the show "weights", with circuits of the given rate in Mbit/s."""
    return Template(_FILES.joinpath("weights_site.yaml").read_text("utf-8")).substitute(gbps=f"{circuit_mbps / 1000:g}")


@dataclass(frozen=True, slots=True)
class BoxOrder:
    """The parameters of a box. `folder` contains the site file and receives the daemon's configuration and all logs.
    `mbps` is the rate of a circuit in Mbit/s. `shows` is either "weights" alone or a subset of SHOWS, in the order of
    SHOWS."""

    folder: str
    shows: tuple[str, ...]
    protocols: tuple[str, ...]
    mbps: float = 20.0
    seconds: float = 2.0  # duration of each rate measurement
    iterations: int = 3  # training iterations on the circuits for training
    collective_s: float = 1.0  # part of a training iteration with traffic
    pause_s: float = 3.0  # part of a training iteration without traffic
    changes: int = 4  # changes of circuits during the transfer of "transition"
    # Parameters of "weights", which has its own site and is not one of SHOWS.
    sync_bytes: int = 200_000_000
    sync_rounds: int = 1
    sync_ways: tuple[str, ...] = SYNC_WAYS
    transport: str = "tcp"
    python: str = ""  # interpreter of the carrier processes; empty: this one


async def run_box(order: BoxOrder, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run a box and return the results of its shows. `warn` is called with the name of each show as it starts. Raises
    Permanent if the box cannot be created or its process fails."""
    words = ("-m", "orchestrrl.lab.box.inside", json.dumps(asdict(order)))
    async with enter.start("box", words, Path(order.folder)) as box:
        while True:
            message: dict[str, Any] = json.loads(await box.next_line(math.inf))
            if "results" in message:
                results: dict[str, Any] = message["results"]
                return results
            warn(message["at"])


COLOURS = {"train": "#eaf1fa", "gen": "#edf6ec", "weight_sync": "#f3f0f8"}


def draw_cycle(cycle: dict[str, Any], path: Path) -> None:
    """Plot the rate between ToRs over time, with the changes of circuits. Also plot each stage's mean rates before and
    after its change."""
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
    line.set_xlabel("time (s); red: changes of circuits, from the command until packets use them")
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
