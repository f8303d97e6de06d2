"""A report as one HTML page, page.html filled in: everything inside, nothing from elsewhere, no script. Same results,
same bytes."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from orchestrrl.core.charts import inline_svg
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.report_page import charts, tables
from orchestrrl.lab.sim.report_page.display_names import ARMS
from orchestrrl.lab.sim.report_page.groups import ArmGroup, groups_of
from orchestrrl.lab.sim.report_page.naming import scenario_names
from orchestrrl.lab.sim.rl.results import ClusterResult, digest_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("page.html")
NOTHING = '<p class="note">Nothing of this is in the results.</p>'
OPEN_TIME_LINES = 4  # the others are folded

# Of a stage: its heading, what its parts are, and how long they took.
PARTS: tuple[tuple[str, str, Callable[[ArmGroup], Mapping[str, float]]], ...] = (
    (
        "A training step",
        "tp, cp, ep, pp and dp: what compute does not hide of exchanges in such groups; bubble: of the pipeline.",
        lambda group: group.first.train_parts_s,
    ),
    ("The last generation step", "Under which engines.", lambda group: group.gen_phases_s),
    (
        "A weight sync",
        "Phase A: until the last bytes have come from other PoDs; phase B: what it takes inside them beyond that.",
        lambda group: group.first.sync_phases_s,
    ),
)


def write(results: Iterable[ClusterResult], path: Path, *, command: str = "") -> None:
    """The page, at `path`. `command`: what makes it again. Raises ProblemFaults where there is nothing to report, or
    the file cannot be written."""
    text = page(list(results), command=command)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProblemFaults([f"{path}: cannot be written: {error.strerror}"]) from error


def page(results: Sequence[ClusterResult], *, command: str = "") -> str:
    """Raises ProblemFaults where there are no results."""
    if not results:
        raise ProblemFaults(["results: must be one at least, got none"])
    groups = groups_of(results)
    names = list(dict.fromkeys(str(result.scenario.get("name") or "scenario") for result in results))
    sections = {
        "summary": tables.summary(groups) + _arms(groups) + _notes(groups),
        "cost": _figure("throughput against cost", charts.pareto(groups)) + tables.cost(groups),
        "timeline": _time_lines(groups),
        "stages": _stages(groups),
        "bandwidth": _pictures("bandwidth per tier", groups, charts.tiers)
        + _folded("All figures", tables.tier_rates(groups)),
        "remaining": _pictures("remaining requests", groups, charts.remaining),
        "slack": _pictures("slack windows", groups, charts.slack) + tables.slack(groups),
        "staleness": tables.staleness(groups),
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
    told = f"{runs} simulated run{'' if runs == 1 else 's'}: "
    told += f"{_list('fabric', [group.fabric for group in groups])}; {_list('arm', [group.arm for group in groups])}; "
    return told + f"{_list('seed', [str(seed) for seed in seeds])}."


def _list(what: str, names: Iterable[str]) -> str:
    different = list(dict.fromkeys(name for name in names if name))
    return f"{what}{'' if len(different) == 1 else 's'} {', '.join(different) or 'unnamed'}"


def _time_lines(groups: Sequence[ArmGroup]) -> str:
    until_s: dict[str, float] = {}  # what is compared is on one scale
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
    """Each part with its own picture, where it is told."""
    body = tables.stages(groups)
    for title, about, of in PARTS:
        having = [group for group in groups if of(group)]
        pictures = "".join(
            _figure(title, charts.parts([of(group) for group in some], some)) for some in _cut(having, charts.PER_PARTS)
        )
        if pictures:
            body += f'<h3>{title}</h3><p class="note">{about}</p>{pictures}'
    if told_steps := tables.steps(groups):
        body += f"<h3>A step of the loop, in the mean after the warm-up: stages may overlap</h3>{told_steps}"
    return body


def _pictures(title: str, groups: Sequence[ArmGroup], draw: "Callable[[Sequence[ArmGroup]], Figure | None]") -> str:
    """One for the scenarios of each name, or several, each with as many groups as can be told apart."""
    return "".join(_figure(title, draw(some)) for some in _cut(groups))


def _figure(title: str, figure: "Figure | None") -> str:
    """Wider than a phone, it is moved sideways: letters stay legible."""
    return f'<figure><div class="wide">{inline_svg(figure, title)}</div></figure>' if figure is not None else ""


def _cut(groups: Sequence[ArmGroup], most: int = charts.PER_CHART) -> list[list[ArmGroup]]:
    cut: list[list[ArmGroup]] = []
    for group in groups:
        if not cut or len(cut[-1]) == most or cut[-1][0].family != group.family:
            cut.append([])
        cut[-1].append(group)
    return cut


def _arms(groups: Sequence[ArmGroup]) -> str:
    told = [f"{arm}: {ARMS[arm]}" for arm in dict.fromkeys(group.arm for group in groups) if arm in ARMS]
    return f'<p class="note">{escape("; ".join(told))}.</p>' if told else ""


def _notes(groups: Sequence[ArmGroup]) -> str:
    """Each once, with who has it."""
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
