"""The pictures of a report, each from groups of runs. Pure; None where there is nothing to draw."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from orchestrrl.sim.net.fabrics.base import Stage
from orchestrrl.sim.report_page.groups import Group, frontier
from orchestrrl.sim.report_page.svg import (
    BOTTOM,
    LEFT,
    TOP,
    Chart,
    Scale,
    colour,
    figure,
    logarithmic,
    number,
    rightwards,
    stairs,
    upwards,
)
from orchestrrl.sim.rl.model import RlRun, Span
from orchestrrl.sim.rl.response_stream import RESPONSE_STREAM

FAULTS = "fault"
STAGE_COLOUR = {Stage.TRAIN: "c0", Stage.GEN: "c2", Stage.WEIGHT_SYNC: "c1"}
STAGE_NAME = {Stage.TRAIN: "training", Stage.GEN: "generation", Stage.WEIGHT_SYNC: "weight sync"}
LANE: Mapping[str, str] = {
    Stage.TRAIN: "train",
    Stage.GEN: "gen",
    Stage.WEIGHT_SYNC: "sync",
    RESPONSE_STREAM: "answers",
}
DURING: Mapping[str, str] = {RESPONSE_STREAM: Stage.GEN}  # what has no time of its own, and goes on beside another
FAULT_COLOUR = "c5"
LANES = ("gen", "sync", "train")  # from above; others below, by name
LANE_HEIGHT, LANE_FILL = 30.0, 0.7
MOST_SPANS = 600  # beyond that a time line shows its beginning
ROW_HEIGHT = 15.0  # of a bar


def time_line(run: RlRun) -> str | None:
    """What each part of the cluster does when."""
    spans = sorted(run.spans, key=lambda span: (span.begin_s, span.lane, span.step))[:MOST_SPANS]
    if not spans:
        return None
    lanes = [*(lane for lane in LANES if any(span.lane == lane for span in spans))]
    lanes += sorted({span.lane for span in spans} - set(lanes))
    chart = Chart("time line of stages", TOP + LANE_HEIGHT * len(lanes) + BOTTOM)
    x = rightwards(max(span.end_s for span in spans))
    chart.axes(x, None, "seconds")
    for row, lane in enumerate(lanes):
        top = TOP + LANE_HEIGHT * row
        chart.text(LEFT - 6, top + LANE_HEIGHT * 0.6, lane, "end")
        for span in spans:
            if span.lane == lane:
                width = x.at(span.end_s) - x.at(span.begin_s)
                y = top + LANE_HEIGHT * (1 - LANE_FILL) / 2
                chart.bar(x.at(span.begin_s), y, width, LANE_HEIGHT * LANE_FILL, _colour(span), _told(span))
    left_out = len(run.spans) - len(spans)
    caption = f"the first {len(spans)} stages; {left_out} more follow" if left_out else ""
    keys = [(STAGE_COLOUR[stage], STAGE_NAME[stage]) for stage in Stage if any(s.stage is stage for s in spans)]
    keys += [(FAULT_COLOUR, "fault")] if FAULTS in lanes else []
    return figure(chart, caption, keys)


def _colour(span: Span) -> str:
    return FAULT_COLOUR if span.lane == FAULTS else STAGE_COLOUR[span.stage]


def _told(span: Span) -> str:
    what = f"{span.lane} {span.step}" + (f", {span.label}" if span.label else "")
    return f"{what}: {number(span.begin_s)} to {number(span.end_s)} s, {number(span.end_s - span.begin_s)} s"


def stage_s(run: RlRun, stage: str) -> float | None:
    """What one of it takes: the median."""
    took = [span.end_s - span.begin_s for span in run.spans if span.stage == stage and span.lane != FAULTS]
    return median(took) if took else None


def tier_gbps(run: RlRun) -> dict[tuple[str, str], float]:
    """By stage and tier: bytes of one such stage over the seconds that one takes, over all links of the tier."""
    found = {}
    for stage, tiers in run.tier_bytes.items():
        seconds = stage_s(run, DURING.get(stage, stage))
        for tier, size in tiers.items():
            if seconds:
                found[stage, tier] = size * 8e-9 / seconds
    return found


def tiers(groups: Sequence[Group]) -> str | None:
    """Bars of bandwidth, a row for each stage, tier and group."""
    rates = [tier_gbps(group.first.run) for group in groups]
    rows = [
        (f"{LANE.get(stage, stage)} {tier}", index, told[stage, tier])
        for stage, tier in sorted({key for told in rates for key in told})
        for index, told in enumerate(rates)
        if (stage, tier) in told
    ]
    return _bars("bandwidth per tier", "Gbps in the mean over a stage, over all links of the tier", rows, groups)


def _bars(title: str, label: str, rows: Sequence[tuple[str, int, float]], groups: Sequence[Group]) -> str | None:
    """Rows of (name, group, value); a name stands beside the first of its rows."""
    if not rows:
        return None
    chart = Chart(title, TOP + ROW_HEIGHT * len(rows) + BOTTOM)
    x = rightwards(max(value for _, _, value in rows) * 1.02)
    chart.axes(x, None, label)
    before = ""
    for row, (name, index, value) in enumerate(rows):
        y = TOP + ROW_HEIGHT * row
        if name != before:
            chart.text(LEFT - 6, y + ROW_HEIGHT * 0.8, name, "end")
        before = name
        told = f"{groups[index].title}, {name}: {number(value)}"
        chart.bar(LEFT, y + 1.5, x.at(value) - LEFT, ROW_HEIGHT - 3, colour(index), told)
    return figure(chart, keys=_keys(groups))


def remaining(groups: Sequence[Group]) -> str | None:
    """Requests in flight over a generation step."""
    drawn = [(index, group.first.run.remaining) for index, group in enumerate(groups) if group.first.run.remaining]
    if not drawn:
        return None
    x = rightwards(max(points[-1][0] for _, points in drawn))
    y = upwards(max(left for _, points in drawn for _, left in points))
    chart = Chart("remaining requests")
    chart.axes(x, y, "seconds from the step's beginning", "requests without an answer")
    for index, points in drawn:
        chart.line(stairs(points, x, y), colour(index), groups[index].title)
    return figure(chart, keys=_keys(groups))


def slack(groups: Sequence[Group]) -> str | None:
    """Share of windows that are at most so long."""
    lengths = [sorted(window.length_s * 1e3 for window in group.first.run.windows) for group in groups]
    positive = [value for told in lengths for value in told if value > 0]
    if not positive:
        return None
    x, y = logarithmic(min(positive), max(positive)), upwards(1.0)
    chart = Chart("slack windows")
    chart.axes(x, y, "milliseconds without a collective", "share of windows")
    for index, told in enumerate(lengths):
        if told:
            points = [(told[0], 0.0), *((value, (place + 1) / len(told)) for place, value in enumerate(told))]
            title = f"{groups[index].title}: {len(told)} windows"
            chart.line(stairs(points, x, y), colour(index), title)
    return figure(chart, keys=_keys(groups))


def pareto(groups: Sequence[Group]) -> str | None:
    """Throughput against dollars of network; the frontier is ringed, and joined by a line."""
    if not any(group.network_usd > 0 for group in groups):
        return None
    best = frontier(groups)
    x = rightwards(max(group.network_usd for group in groups) / 1e6 * 1.05)
    y = upwards(max(group.samples_per_s for group in groups))
    chart = Chart("throughput against cost")
    chart.axes(x, y, "network, million dollars", "samples per second")
    ahead = sorted(
        (group.network_usd, group.samples_per_s) for group, is_best in zip(groups, best, strict=True) if is_best
    )
    chart.line(_corners(ahead, x, y), "c6", "Pareto frontier", dashed=True)
    for index, (group, is_best) in enumerate(zip(groups, best, strict=True)):
        told = f"{group.title}: {number(group.samples_per_s)} samples/s for ${number(group.network_usd)}"
        told += ", on the frontier" if is_best else ""
        chart.dot(x.at(group.network_usd / 1e6), y.at(group.samples_per_s), colour(index), told, ringed=is_best)
    return figure(chart, "ringed: nothing else has as much throughput for as little money", _keys(groups))


def _corners(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """What the money buys at most: it rises only where another is reached."""
    return stairs([(usd / 1e6, rate) for usd, rate in points], x, y)


def parts(title: str, told: Sequence[Mapping[str, float]], groups: Sequence[Group]) -> str | None:
    """Seconds of each group, one stretch of a bar behind the other; a colour for each part."""
    names = list(dict.fromkeys(name for each in told for name, seconds in each.items() if seconds > 0))
    totals = [sum(each.values()) for each in told]
    if not names or not max(totals, default=0.0) > 0:
        return None
    chart = Chart(title, TOP + 2 * ROW_HEIGHT * len(groups) + BOTTOM)
    x = rightwards(max(totals) * 1.02)
    chart.axes(x, None, "seconds")
    for row, (group, each) in enumerate(zip(groups, told, strict=True)):
        top = TOP + 2 * ROW_HEIGHT * row
        ends = [sum(list(each.values())[:count]) for count in range(len(each) + 1)]
        chart.text(LEFT, top + ROW_HEIGHT * 0.8, group.title)
        for name, (begin, end) in zip(each, pairwise(ends), strict=True):
            if end > begin:
                label = f"{group.title}, {name}: {number(end - begin)} s"
                kind = colour(names.index(name))
                chart.bar(x.at(begin), top + ROW_HEIGHT, x.at(end) - x.at(begin), ROW_HEIGHT - 3, kind, label)
    return figure(chart, keys=[(colour(place), name) for place, name in enumerate(names)])


def _keys(groups: Sequence[Group]) -> list[tuple[str, str]]:
    return [(colour(index), group.title) for index, group in enumerate(groups)]
