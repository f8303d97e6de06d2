"""Render a report as one HTML page from the template page.html, without external resources or scripts.

The page is deterministic. A table cell shows a rounded number; its attribute `data-value` has all digits.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrrl.core.charts import inline_svg
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.report_page import charts
from orchestrrl.lab.sim.report_page.charts import by_stage, stage_s, tier_gbps
from orchestrrl.lab.sim.report_page.groups import (
    ARMS,
    OF_A_STEP,
    STAGES,
    TIERS,
    ArmGroup,
    display_name,
    frontier,
    groups_of,
    number,
    rank,
    scenario_names,
)
from orchestrrl.lab.sim.rl.results import ClusterResult, digest_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class PercentShare:
    """A fraction that is displayed as a percentage."""

    value: float


Cell = str | float | int | PercentShare | None
Row = Mapping[str, Cell]  # by column; the column of row names has the empty name


def table(rows: Sequence[Row], best: Sequence[bool] = ()) -> str:
    """Return an HTML table. The first column names the rows. Rows for which `best` is true are marked. Empty columns
    are omitted."""
    if not rows:
        return ""
    columns = [name for name in rows[0] if not name or any(row[name] is not None for row in rows)]
    words = {name for name in columns for row in rows if isinstance(row[name], str)}
    head = "".join(f'<th scope="col"{_word(name in words)}>{escape(name)}</th>' for name in columns)
    body = ""
    for row, is_best in zip(rows, best or [False] * len(rows), strict=True):
        cells = "".join(_cell(row[name]) for name in columns[1:])
        kind = ' class="best"' if is_best else ""
        body += f'<tr{kind}><th scope="row">{escape(str(row[columns[0]]))}</th>{cells}</tr>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _word(is_word: bool) -> str:
    return ' class="word"' if is_word else ""


def _cell(value: Cell) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, str):
        return f"<td{_word(True)}>{escape(value)}</td>"
    if isinstance(value, PercentShare):
        return f'<td data-value="{value.value!r}">{value.value:.1%}</td>'
    return f'<td data-value="{value!r}">{escape(number(value))}</td>'


def summary(groups: Sequence[ArmGroup]) -> str:
    """Return the table of throughput and network cost. Throughput is also shown relative to the first group with the
    same scenario name."""
    first: dict[str, float] = {}
    sizes = Counter(group.family for group in groups)
    rows: list[Row] = []
    for group in groups:
        reference = first.setdefault(group.family, group.samples_per_s)
        least, most = group.spread if len(group.seeds) > 1 else (None, None)
        rows.append(
            {
                "": group.title,
                "seeds": ", ".join(map(str, group.seeds)),
                "samples/s": group.samples_per_s,
                "minimum over seeds": least,
                "maximum over seeds": most,
                "relative to the first": group.samples_per_s / reference
                if reference > 0 and sizes[group.family] > 1
                else None,
                "network, M$": group.network_usd / 1e6 if group.network_usd else None,
                "samples/s per M$": group.samples_per_s_per_musd if group.network_usd else None,
                "trainer idle": _share(group.idle_share(FabricStage.TRAIN)),
                "engines idle": _share(group.idle_share(FabricStage.GEN)),
                "samples trained on": group.first.run.samples,
            }
        )
    return table(rows)


def _share(value: float | None) -> PercentShare | None:
    return None if value is None else PercentShare(value)


def stages(groups: Sequence[ArmGroup]) -> str:
    """Return the table of stage durations, as medians over the stages of the first seed."""
    return table(
        [
            {
                "": group.title,
                "training, s": stage_s(group.first.run, FabricStage.TRAIN),
                "generation, s": stage_s(group.first.run, FabricStage.GEN),
                "weight sync, s": stage_s(group.first.run, FabricStage.WEIGHT_SYNC),
                "MFU of training": _share(group.first.train_mfu or None),
            }
            for group in groups
        ]
    )


def steps(groups: Sequence[ArmGroup]) -> str:
    """Return the table of the mean time, in seconds, that each activity takes in a step. Activities that take no time
    in any group are omitted."""
    means = [group.mean_step_s() for group in groups]
    names = sorted(
        {name for each in means for name, seconds in each.items() if seconds > 0},
        key=lambda name: rank(OF_A_STEP, name),
    )
    rows: list[Row] = [
        {"": group.title, **{f"{display_name(OF_A_STEP, name)}, s": each.get(name) for name in names}}
        for group, each in zip(groups, means, strict=True)
    ]
    return table(rows if names else [])


def tier_rates(groups: Sequence[ArmGroup]) -> str:
    """Return the table of the amount of data and the bandwidth for each stage and tier."""
    return table(
        [
            {
                "": group.title,
                "stage": display_name(STAGES, stage),
                "tier": display_name(TIERS, tier),
                "GB per stage": group.first.run.tier_bytes[stage][tier] / 1e9,
                "Gbps": rate,
            }
            for group in groups
            for (stage, tier), rate in sorted(tier_gbps(group.first.run).items(), key=lambda each: by_stage(*each[0]))
        ]
    )


def slack(groups: Sequence[ArmGroup]) -> str:
    """Return the table of the slack windows of an optimiser step, with their number and the quantiles of their lengths
    in milliseconds. Only the stored windows are counted, which are a sample of all windows."""
    rows: list[Row] = []
    for group in groups:
        if lengths_ms := [window.length_s * 1e3 for window in group.first.run.windows]:
            quantiles = {f"{each:.0%} quantile, ms": float(np.quantile(lengths_ms, each)) for each in QUANTILES}
            rows.append({"": group.title, "windows": len(lengths_ms), **quantiles, "longest, ms": max(lengths_ms)})
    return table(rows)


def staleness(groups: Sequence[ArmGroup]) -> str:
    """Return the table of staleness. It shows the fraction of samples for each lag, which is the number of versions
    that the samples are behind when they are trained on."""
    lags = sorted({lag for group in groups for lag in group.first.run.staleness})
    rows: list[Row] = []
    for group in groups:
        counts = group.first.run.staleness
        if total := sum(counts.values()):
            shares = {f"{lag} behind": PercentShare(counts.get(lag, 0) / total) for lag in lags}
            rows.append({"": group.title, **shares})
    return table(rows)


def cost(groups: Sequence[ArmGroup]) -> str:
    """Return the table of costs, in which the rows on the Pareto frontier are marked."""
    names = sorted({name for group in groups for name in group.first.bill.parts_usd})
    priced = [group for group in groups if group.network_usd]
    best = frontier(priced)
    rows: list[Row] = [
        {
            "": group.title,
            "frontier": "yes" if is_best else "",
            "network, $": group.network_usd,
            **{f"{display_name({}, name)}, $": group.first.bill.parts_usd.get(name) for name in names},
            "GPUs, $": group.first.bill.gpus_usd,
            "samples/s per M$ of network": group.samples_per_s_per_musd,
        }
        for group, is_best in zip(priced, best, strict=True)
    ]
    return table(rows, best)


TEMPLATE = Path(__file__).with_name("page.html")
NOTHING = '<p class="note">The results contain no such data.</p>'
OPEN_TIME_LINES = 4  # the others are collapsed

# For each stage: its heading, a description of its parts, and their times.
PARTS: tuple[tuple[str, str, Callable[[ArmGroup], Mapping[str, float]]], ...] = (
    (
        "A training step",
        "tp, cp, ep, pp and dp: communication of these groups that compute does not hide; bubble: pipeline bubbles.",
        lambda group: group.first.train_parts_s,
    ),
    ("The last generation step", "Time by engines.", lambda group: group.gen_phases_s),
    (
        "A weight sync",
        "Phase A: until the last bytes from other PoDs have arrived; phase B: the remaining time inside PoDs.",
        lambda group: group.first.sync_phases_s,
    ),
)


def write(results: Iterable[ClusterResult], path: Path, *, command: str = "") -> None:
    """Write the page to `path`. `command` is the command line that reproduces the page. Raises ProblemFaults if there
    are no results, or if the file cannot be written."""
    text = page(list(results), command=command)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProblemFaults([f"{path}: cannot be written: {error.strerror}"]) from error


def page(results: Sequence[ClusterResult], *, command: str = "") -> str:
    """Return the page as HTML. `command` is the command line that reproduces the page. Raises ProblemFaults if there
    are no results."""
    if not results:
        raise ProblemFaults(["results: must not be empty"])
    groups = groups_of(results)
    names = list(dict.fromkeys(str(result.scenario.get("name") or "scenario") for result in results))
    sections = {
        "summary": summary(groups) + _arms(groups) + _notes(groups),
        "cost": _figure("throughput against cost", charts.pareto(groups)) + cost(groups),
        "timeline": _time_lines(groups),
        "stages": _stages(groups),
        "bandwidth": _pictures("bandwidth per tier", groups, charts.tiers) + _folded("All figures", tier_rates(groups)),
        "remaining": _pictures("remaining requests", groups, charts.remaining),
        "slack": _pictures("slack windows", groups, charts.slack) + slack(groups),
        "staleness": staleness(groups),
        "scenarios": _scenarios(results),
    }
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        {name: body or NOTHING for name, body in sections.items()},
        title=escape(", ".join(names) if len(names) <= 3 else f"{len(names)} scenarios"),
        about=escape(_what(results, groups)),
        command=f"<p>Made by <code>{escape(command)}</code>.</p>" if command else "",
    )


def _what(results: Sequence[ClusterResult], groups: Sequence[ArmGroup]) -> str:
    seeds = sorted({result.run.seed for result in results})
    runs = sum(len(group.results) for group in groups)
    text = f"{runs} simulated run{'' if runs == 1 else 's'}: "
    text += f"{_list('fabric', [group.fabric for group in groups])}; {_list('arm', [group.arm for group in groups])}; "
    return text + f"{_list('seed', [str(seed) for seed in seeds])}."


def _list(what: str, names: Iterable[str]) -> str:
    different = list(dict.fromkeys(name for name in names if name))
    return f"{what}{'' if len(different) == 1 else 's'} {', '.join(different) or 'unnamed'}"


def _time_lines(groups: Sequence[ArmGroup]) -> str:
    until_s: dict[str, float] = {}  # compared groups share a scale
    for group in groups:
        ends_s = [span.end_s for span in group.first.run.spans]
        until_s[group.family] = max([until_s.get(group.family, 0.0), *ends_s])
    shown = ""
    for place, group in enumerate(group for group in groups if group.first.run.spans):
        title = f"{group.title}, seed {group.first.run.seed}"
        drawn = charts.time_line(group.first.run, until_s[group.family])
        shown += _folded(title, _figure(f"time line of {title}", drawn), is_open=place < OPEN_TIME_LINES)
    return shown


def _stages(groups: Sequence[ArmGroup]) -> str:
    """Return the section of stages, with a chart for each stage that has parts."""
    body = stages(groups)
    for title, about, of in PARTS:
        having = [group for group in groups if of(group)]
        pictures = "".join(
            _figure(title, charts.parts([of(group) for group in some], some)) for some in _cut(having, charts.PER_PARTS)
        )
        if pictures:
            body += f'<h3>{title}</h3><p class="note">{about}</p>{pictures}'
    if told_steps := steps(groups):
        body += f"<h3>A step of the loop, in the mean after the warm-up: stages may overlap</h3>{told_steps}"
    return body


def _pictures(title: str, groups: Sequence[ArmGroup], draw: "Callable[[Sequence[ArmGroup]], Figure | None]") -> str:
    """Return charts for the groups of each scenario name. A chart contains at most as many groups as can be
    distinguished."""
    return "".join(_figure(title, draw(some)) for some in _cut(groups))


def _figure(title: str, figure: "Figure | None") -> str:
    """Return the chart as HTML. The chart scrolls horizontally on narrow screens, so that its text stays legible."""
    return f'<figure><div class="wide">{inline_svg(figure, title)}</div></figure>' if figure is not None else ""


def _cut(groups: Sequence[ArmGroup], most: int = charts.PER_CHART) -> list[list[ArmGroup]]:
    cut: list[list[ArmGroup]] = []
    for group in groups:
        if not cut or len(cut[-1]) == most or cut[-1][0].family != group.family:
            cut.append([])
        cut[-1].append(group)
    return cut


def _arms(groups: Sequence[ArmGroup]) -> str:
    described = [f"{arm}: {ARMS[arm]}" for arm in dict.fromkeys(group.arm for group in groups) if arm in ARMS]
    return f'<p class="note">{escape("; ".join(described))}.</p>' if described else ""


def _notes(groups: Sequence[ArmGroup]) -> str:
    """Return the notes of all runs, each distinct note once, with the groups that have the note."""
    having: dict[str, list[str]] = {}
    for group in groups:
        for note in group.first.run.notes:
            having.setdefault(note, []).append(group.title)
    lines = [
        f"<li>{escape(note)} ({escape('all' if len(some) == len(groups) > 1 else ', '.join(some))})</li>"
        for note, some in having.items()
    ]
    return _folded("Notes", f'<ul class="note">{"".join(lines)}</ul>' if lines else "")


def _folded(title: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' * is_open}><summary>{escape(title)}</summary>{body}</details>" if body else ""


def _scenarios(results: Sequence[ClusterResult]) -> str:
    documents: dict[str, Mapping[str, Any]] = {}
    seeds: dict[str, set[int]] = {}
    for result in results:
        digest = digest_of(result.scenario)
        documents.setdefault(digest, result.scenario)
        seeds.setdefault(digest, set()).add(result.run.seed)
    names = scenario_names(documents.values())
    shown = ""
    for digest, document in documents.items():
        title = f"{names[digest]}, digest {digest}, {_list('seed', map(str, sorted(seeds[digest])))}"
        text = json.dumps(document, indent=1, ensure_ascii=False)
        shown += _folded(title, f"<pre>{escape(text)}</pre>")
    return shown
