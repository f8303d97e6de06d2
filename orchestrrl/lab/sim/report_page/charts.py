"""Draw the charts of a report. Most charts show several groups of runs in one figure. A function returns None if there
is no data for its chart."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING

from orchestrrl.core.charts import ChartBar, ChartLine, add_legend, add_stairs, axes, bar_chart
from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.report_page.groups import LANES, STAGES, TIERS, ArmGroup, display_name, frontier, number, rank
from orchestrrl.lab.sim.rl.model import RlRun, TimelineSpan
from orchestrrl.lab.sim.rl.training import RESPONSE_STREAM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAULTS = "fault"
STAGE_COLOUR = {FabricStage.TRAIN: "C0", FabricStage.GEN: "C2", FabricStage.WEIGHT_SYNC: "C1"}
DURING: Mapping[str, str] = {
    RESPONSE_STREAM: FabricStage.GEN
}  # stages without a duration of their own, by the stage during which they run
FAULT_COLOUR = "C3"
FAULT_LANES, FAULT_LETTERS = 6, 12  # limits: number of separate lanes, and characters of a lane's label
MOST_SPANS = 600  # a longer time line is truncated
LEAST_GBPS = 0.01  # smaller bandwidths are shown as less than this
NEAR = 0.006  # fraction of an axis: closer dots hide each other, so that the one behind is drawn larger
PER_CHART = 8  # maximum groups per chart: the number of line styles
PER_PARTS = 24  # maximum groups per chart whose colours do not denote groups


def time_line(run: RlRun, until_s: float) -> "Figure | None":
    """Draw the activities of each part of the cluster over time. The time axis ends at `until_s`, or earlier if the run
    has too many activities to draw them all."""
    spans = sorted(run.spans, key=lambda span: (span.begin_s, span.lane, span.step))[:MOST_SPANS]
    if not spans:
        return None
    lanes = _lanes(spans)
    bars = [
        ChartBar(
            row,
            span.begin_s,
            span.end_s,
            FAULT_COLOUR if span.lane == FAULTS else STAGE_COLOUR[span.stage],
            f"{span.lane} {span.step}{', ' * bool(span.label)}{span.label}: {number(span.begin_s)} to"
            f" {number(span.end_s)} s, {number(span.end_s - span.begin_s)} s",
        )
        for row, inside in enumerate(lanes.values())
        for span in inside
    ]
    left_out = len(run.spans) - len(spans)
    until_s = min(until_s, spans[-1].end_s) if left_out else until_s
    figure = bar_chart(bars, dict(enumerate(lanes)), "seconds", until=until_s)
    if left_out:
        figure.suptitle(f"the first {len(spans)} stages; {left_out} more follow", fontsize=9)
    return figure


def _lanes(spans: Sequence[TimelineSpan]) -> dict[str, list[TimelineSpan]]:
    """Return the spans by lane name, from the top lane to the bottom lane. If there are only a few faults, each gets
    its own lane, because faults may overlap."""
    labels = {span.label for span in spans if span.lane == FAULTS}
    few = len(labels) <= FAULT_LANES and all(len(label) <= FAULT_LETTERS for label in labels)
    lanes: dict[str, list[TimelineSpan]] = {}
    for span in sorted(spans, key=lambda span: rank(LANES, span.lane)):
        own = span.label if span.lane == FAULTS and few else ""
        lanes.setdefault(own or display_name(LANES, span.lane), []).append(span)
    return lanes


def stage_s(run: RlRun, stage: str) -> float | None:
    """Return the median duration of a stage in seconds, or None if the stage did not run."""
    took = [span.end_s - span.begin_s for span in run.spans if span.stage == stage and span.lane != FAULTS]
    return median(took) if took else None


def tier_gbps(run: RlRun) -> dict[tuple[str, str], float]:
    """Return the mean bandwidth, in Gbps, of each stage on each tier, by (stage, tier). It is the amount of data that
    the stage sends over all links of the tier, divided by the stage's duration."""
    found = {}
    for stage, tiers in run.tier_bytes.items():
        seconds = stage_s(run, DURING.get(stage, stage))
        for tier, size in tiers.items():
            if seconds:
                found[stage, tier] = size * 8e-9 / seconds
    return found


def by_stage(stage: str, tier: str) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return a sort key that orders bandwidths by stage and then by tier."""
    return rank(STAGES, stage), rank(TIERS, tier)


def tiers(groups: Sequence[ArmGroup]) -> "Figure | None":
    """Draw bandwidths as bars, with one bar for each stage, tier and group."""
    rates = [tier_gbps(group.first.run) for group in groups]
    bars: list[ChartBar] = []
    names: dict[float, str] = {}
    row = 0.0
    for stage, tier in sorted({key for by_tier in rates for key in by_tier}, key=lambda key: by_stage(*key)):
        name = f"{display_name(STAGES, stage)}, {display_name(TIERS, tier)}"
        names[row] = name
        for index, by_tier in enumerate(rates):
            if (value := by_tier.get((stage, tier))) is not None:
                label = number(value) if value >= LEAST_GBPS else f"< {LEAST_GBPS}"
                tooltip = f"{groups[index].title}, {name}: {number(value)}"
                bars.append(ChartBar(row, 0.0, value, f"C{index}", tooltip, label))
                row += 0.8
        row += 0.5
    if not bars:
        return None
    figure = bar_chart(bars, names, "Gbps, mean over a stage, all links of the tier")
    add_legend(figure, {group.title: f"C{index}" for index, group in enumerate(groups)})
    return figure


def remaining(groups: Sequence[ArmGroup]) -> "Figure | None":
    """Draw the number of requests without an answer over the time of a generation step."""
    lines = [ChartLine(group.title, group.first.run.remaining) for group in groups]
    if not any(line.points for line in lines):
        return None
    return _stairs(lines, "seconds from the step's beginning", "requests without an answer")


def slack(groups: Sequence[ArmGroup]) -> "Figure | None":
    """Draw the cumulative distribution of the lengths of slack windows."""
    lines = []
    for group in groups:
        lengths_ms = sorted(window.length_s * 1e3 for window in group.first.run.windows)
        points = [(value, 100 * place / len(lengths_ms)) for place, value in enumerate(lengths_ms, 1)]
        start = [(lengths_ms[0], 0.0)] if lengths_ms else []
        lines.append(ChartLine(group.title, start + points, f"{group.title}: {len(lengths_ms)} windows"))
    if not any(value > 0 for line in lines for value, _ in line.points):
        return None
    figure = _stairs(lines, "window, milliseconds", "% of windows at most as long")
    figure.axes[0].set_xscale("log")
    figure.axes[0].xaxis.set_major_formatter(lambda value, _: number(value))
    return figure


def _stairs(lines: Sequence[ChartLine], x_label: str, y_label: str) -> "Figure":
    figure, [[axis]] = axes()
    add_stairs(axis, lines)
    axis.set(xlabel=x_label, ylabel=y_label, ylim=(0, None), xmargin=0.01)
    axis.grid(alpha=0.4)
    add_legend(figure)
    return figure


def pareto(groups: Sequence[ArmGroup]) -> "Figure | None":
    """Draw throughput against network cost. The groups on the Pareto frontier are ringed and connected by a line."""
    priced = [group for group in groups if group.network_usd > 0]
    if not priced:
        return None
    figure, [[axis]] = axes()
    best = frontier(priced)
    places = [(group.network_usd / 1e6, group.samples_per_s) for group in priced]
    ahead = sorted(place for place, is_best in zip(places, best, strict=True) if is_best)
    axis.step(*zip(*ahead, strict=True), where="post", color="grey", linestyle="--", linewidth=1, gid="Pareto frontier")
    # With more groups than colours, colours denote fabrics, and tooltips name the groups.
    names = [group.title if len(groups) <= PER_CHART else group.fabric for group in priced]
    colours = {name: f"C{index % 10}" for index, name in enumerate(dict.fromkeys(names))}
    usd, rates = ([place[side] for place in places] for side in (0, 1))
    axis.set(xlim=(0, max(usd) * 1.1), ylim=(0, max(rates) * 1.1 or 1.0))
    for index, (group, is_best, name) in enumerate(zip(priced, best, names, strict=True)):
        hidden = sum(
            abs(each - usd[index]) < NEAR * max(usd) and abs(rate - rates[index]) <= NEAR * max(rates)
            for each, rate in places[index + 1 :]
        )
        axis.scatter(
            *places[index],
            s=(8 + 4 * min(hidden, 4)) ** 2,
            color=colours[name],
            edgecolors="black" if is_best else "white",
            linewidths=1.5,
            zorder=3,
            gid=f"{group.title}: {number(group.samples_per_s)} samples/s for ${number(group.network_usd)}"
            + (", on the frontier" if is_best else ""),
        )
    axis.set(xlabel="network, million dollars", ylabel="samples per second")
    axis.set_title("ringed: on the Pareto frontier of throughput and cost", fontsize=9)
    axis.grid(alpha=0.4)
    add_legend(figure, colours)
    return figure


def parts(parts_s: Sequence[Mapping[str, float]], groups: Sequence[ArmGroup]) -> "Figure | None":
    """Draw one stacked bar for each group, with one colour per part, and the sum at the end of the bar. `parts_s`
    contains the time, in seconds, of each part of each group."""
    shown = list(dict.fromkeys(name for each in parts_s for name, seconds in each.items() if seconds > 0))
    if not shown:
        return None
    colours = {name: f"C{index % 10}" for index, name in enumerate(shown)}
    bars = []
    for row, (group, each) in enumerate(zip(groups, parts_s, strict=True)):
        stretches = {name: seconds for name, seconds in each.items() if seconds > 0}
        ends = list(accumulate(stretches.values(), initial=0.0))
        for place, (name, (begin, end)) in enumerate(zip(stretches, pairwise(ends), strict=True), 1):
            label = f"{number(end)} s" if place == len(stretches) else ""
            tooltip = f"{group.title}, {name}: {number(stretches[name])} s"
            bars.append(ChartBar(row, begin, end, colours[name], tooltip, label))
    figure = bar_chart(bars, {row: group.title for row, group in enumerate(groups)}, "seconds")
    add_legend(figure, colours)
    return figure
