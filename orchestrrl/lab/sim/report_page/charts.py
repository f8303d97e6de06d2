"""The pictures of a report, each from groups of runs. Pure; None where there is nothing to draw."""

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from statistics import median

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.report_page.display_names import LANES, STAGES, TIERS, display_name, rank
from orchestrrl.lab.sim.report_page.groups import ArmGroup, frontier
from orchestrrl.lab.sim.report_page.svg import (
    BOTTOM,
    LEFT,
    TOP,
    AxisScale,
    Chart,
    Dot,
    colour,
    figure,
    logarithmic,
    number,
    rightwards,
    stairs,
    stroke,
    upwards,
)
from orchestrrl.lab.sim.rl.model import RlRun, TimelineSpan
from orchestrrl.lab.sim.rl.response_stream import RESPONSE_STREAM

FAULTS = "fault"
STAGE_COLOUR = {FabricStage.TRAIN: "c0", FabricStage.GEN: "c2", FabricStage.WEIGHT_SYNC: "c1"}
DURING: Mapping[str, str] = {
    RESPONSE_STREAM: FabricStage.GEN
}  # what has no time of its own, and goes on beside another
FAULT_COLOUR = "c5"
FAULT_LANES, FAULT_LETTERS = 6, 12  # at most: of their own, and of a name beside one
LANE_HEIGHT, LANE_FILL = 30.0, 0.7
MOST_SPANS = 600  # beyond that a time line shows its beginning
ROW_HEIGHT = 15.0  # of a bar
HEAD_HEIGHT = 21.0  # of a name above bars
LEAST_GBPS = 0.01  # what is less is next to nothing
BARS_LEFT = 8.0  # names stand above them
AT_END = 0.9  # of the width, for bars with a figure behind them
PER_CHART = 8  # groups in one picture: as many as there are dashes
PER_PARTS = 24  # where colours are not those of groups


def time_line(run: RlRun, until_s: float) -> str | None:
    """What each part of the cluster does when; the axis ends at `until_s`."""
    spans = sorted(run.spans, key=lambda span: (span.begin_s, span.lane, span.step))[:MOST_SPANS]
    if not spans:
        return None
    lanes = _lanes(spans)
    chart = Chart("time line of stages", TOP + LANE_HEIGHT * len(lanes) + BOTTOM)
    x = rightwards(min(until_s, spans[-1].end_s) if len(spans) < len(run.spans) else until_s)
    chart.axes(x, None, "seconds")
    for row, (name, inside) in enumerate(lanes.items()):
        top = TOP + LANE_HEIGHT * row
        chart.text(LEFT - 6, top + LANE_HEIGHT * 0.6, name, "end", "name")
        for span in inside:
            width = x.at(span.end_s) - x.at(span.begin_s)
            y = top + LANE_HEIGHT * (1 - LANE_FILL) / 2
            chart.bar(x.at(span.begin_s), y, width, LANE_HEIGHT * LANE_FILL, _colour(span), _span_text(span))
    left_out = len(run.spans) - len(spans)
    caption = f"the first {len(spans)} stages; {left_out} more follow" if left_out else ""
    return figure(chart, caption)


def _lanes(spans: Sequence[TimelineSpan]) -> dict[str, list[TimelineSpan]]:
    """By name, from above. Faults may hold at the same time: each has a lane of its own, where they are few."""
    labels = {span.label for span in spans if span.lane == FAULTS}
    few = len(labels) <= FAULT_LANES and all(len(label) <= FAULT_LETTERS for label in labels)
    lanes: dict[str, list[TimelineSpan]] = {}
    for span in sorted(spans, key=lambda span: rank(LANES, span.lane)):
        own = span.label if span.lane == FAULTS and few else ""
        lanes.setdefault(own or display_name(LANES, span.lane), []).append(span)
    return lanes


def _colour(span: TimelineSpan) -> str:
    return FAULT_COLOUR if span.lane == FAULTS else STAGE_COLOUR[span.stage]


def _span_text(span: TimelineSpan) -> str:
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


def by_stage(stage: str, tier: str) -> tuple[tuple[int, str], tuple[int, str]]:
    """To sort bandwidths by."""
    return rank(STAGES, stage), rank(TIERS, tier)


def tiers(groups: Sequence[ArmGroup]) -> str | None:
    """Bars of bandwidth, a row for each stage, tier and group."""
    rates = [tier_gbps(group.first.run) for group in groups]
    bars = {
        f"{display_name(STAGES, stage)}, {display_name(TIERS, tier)}": [
            (index, told[stage, tier]) for index, told in enumerate(rates) if (stage, tier) in told
        ]
        for stage, tier in sorted({key for told in rates for key in told}, key=lambda key: by_stage(*key))
    }
    return _bars("bandwidth per tier", "Gbps in the mean over a stage, over all links of the tier", bars, groups)


def _bars(
    title: str, label: str, bars: Mapping[str, Sequence[tuple[int, float]]], groups: Sequence[ArmGroup]
) -> str | None:
    """By name, bars of (group, value) below it; values stand behind them, since they may be far apart."""
    if not bars:
        return None
    rows = sum(map(len, bars.values()))
    chart = Chart(title, TOP + HEAD_HEIGHT * len(bars) + ROW_HEIGHT * rows + BOTTOM)
    x = rightwards(max(value for some in bars.values() for _, value in some) / AT_END, BARS_LEFT)
    chart.axes(x, None, label)
    y = TOP
    for name, some in bars.items():
        chart.text(BARS_LEFT, y + HEAD_HEIGHT - 5, name, kind="name")
        y += HEAD_HEIGHT
        for index, value in some:
            told = f"{groups[index].title}, {name}: {number(value)}"
            chart.bar(BARS_LEFT, y, x.at(value) - BARS_LEFT, ROW_HEIGHT - 3, colour(index), told)
            chart.text(x.at(value) + 5, y + ROW_HEIGHT - 5, number(value) if value >= LEAST_GBPS else f"< {LEAST_GBPS}")
            y += ROW_HEIGHT
    return figure(chart, keys=_keys(groups))


def remaining(groups: Sequence[ArmGroup]) -> str | None:
    """Requests in flight over a generation step."""
    drawn = [(index, group.first.run.remaining) for index, group in enumerate(groups) if group.first.run.remaining]
    if not drawn:
        return None
    x = rightwards(max(points[-1][0] for _, points in drawn))
    y = upwards(max(left for _, points in drawn for _, left in points))
    chart = Chart("remaining requests")
    chart.axes(x, y, "seconds from the step's beginning", "requests without an answer")
    for index, points in drawn:
        chart.line(stairs(points, x, y), stroke(index), groups[index].title)
    return figure(chart, keys=_line_keys(groups, {index for index, _ in drawn}))


def slack(groups: Sequence[ArmGroup]) -> str | None:
    """Share of windows that are at most so long."""
    lengths = [sorted(window.length_s * 1e3 for window in group.first.run.windows) for group in groups]
    positive = [value for told in lengths for value in told if value > 0]
    if not positive:
        return None
    x, y = logarithmic(min(positive), max(positive)), upwards(100.0)
    chart = Chart("slack windows")
    chart.axes(x, y, "window, milliseconds", "% of windows that are no longer")
    for index, told in enumerate(lengths):
        if told:
            points = [(told[0], 0.0), *((value, 100 * (place + 1) / len(told)) for place, value in enumerate(told))]
            title = f"{groups[index].title}: {len(told)} windows"
            chart.line(stairs(points, x, y), stroke(index), title)
    return figure(chart, keys=_line_keys(groups, {index for index, told in enumerate(lengths) if told}))


def pareto(groups: Sequence[ArmGroup]) -> str | None:
    """Throughput against dollars of network; the frontier is ringed, and joined by a line."""
    priced = [group for group in groups if group.network_usd > 0]
    if not priced:
        return None
    best = frontier(priced)
    x = rightwards(max(group.network_usd for group in priced) / 1e6 * 1.05)
    y = upwards(max(group.samples_per_s for group in priced))
    chart = Chart("throughput against cost")
    chart.axes(x, y, "network, million dollars", "samples per second")
    ahead = sorted(
        (group.network_usd, group.samples_per_s) for group, is_best in zip(priced, best, strict=True) if is_best
    )
    chart.line(_corners(ahead, x, y), "c6 edge", "Pareto frontier")
    # More than there are colours: by fabric, and each says the rest when pointed at.
    names = {id(group): group.title if len(groups) <= PER_CHART else group.fabric for group in groups}
    kinds = {name: colour(index) for index, name in enumerate(dict.fromkeys(names.values()))}
    dots = []
    for group, is_best in zip(priced, best, strict=True):
        at = x.at(group.network_usd / 1e6), y.at(group.samples_per_s)
        dots.append(Dot(*at, kinds[names[id(group)]], _worth_showing(group, is_best), is_best))
    chart.dots(dots)
    keys = [(kinds[name], name) for name in dict.fromkeys(names[id(group)] for group in priced)]
    return figure(chart, "ringed: nothing else has as much throughput for as little money", keys)


def _worth_showing(group: ArmGroup, is_best: bool) -> str:
    told = f"{group.title}: {number(group.samples_per_s)} samples/s for ${number(group.network_usd)}"
    return told + (", on the frontier" if is_best else "")


def _corners(points: Sequence[tuple[float, float]], x: AxisScale, y: AxisScale) -> list[tuple[float, float]]:
    """What the money buys at most: it rises only where another is reached."""
    return stairs([(usd / 1e6, rate) for usd, rate in points], x, y)


def parts(title: str, told: Sequence[Mapping[str, float]], groups: Sequence[ArmGroup]) -> str | None:
    """Seconds of each group, one stretch of a bar behind the other and their sum at the end; a colour for each part."""
    names = list(dict.fromkeys(name for each in told for name in each))
    shown = [name for name in names if any(each.get(name, 0.0) > 0 for each in told)]
    if not shown:
        return None
    totals = [sum(each.values()) for each in told]
    chart = Chart(title, TOP + (HEAD_HEIGHT + ROW_HEIGHT) * len(groups) + BOTTOM)
    x = rightwards(max(totals) / AT_END, BARS_LEFT)
    chart.axes(x, None, "seconds")
    for row, (group, each, total) in enumerate(zip(groups, told, totals, strict=True)):
        top = TOP + (HEAD_HEIGHT + ROW_HEIGHT) * row + HEAD_HEIGHT
        ends = [sum(list(each.values())[:count]) for count in range(len(each) + 1)]
        chart.text(BARS_LEFT, top - 5, group.title, kind="name")
        for name, (begin, end) in zip(each, pairwise(ends), strict=True):
            if end > begin:
                label = f"{group.title}, {name}: {number(end - begin)} s"
                kind = colour(shown.index(name))
                chart.bar(x.at(begin), top, x.at(end) - x.at(begin), ROW_HEIGHT - 3, kind, label)
        chart.text(x.at(total) + 5, top + ROW_HEIGHT - 5, f"{number(total)} s")
    return figure(chart, keys=[(colour(place), name) for place, name in enumerate(shown)])


def _keys(groups: Sequence[ArmGroup]) -> list[tuple[str, str]]:
    return [(colour(index), group.title) for index, group in enumerate(groups)]


def _line_keys(groups: Sequence[ArmGroup], drawn: Container[int]) -> list[tuple[str, str]]:
    return [(stroke(index), group.title) for index, group in enumerate(groups) if index in drawn]
