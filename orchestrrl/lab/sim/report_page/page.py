"""A report as one HTML page: everything inside, nothing from elsewhere, no script. Same results, same bytes."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.report_page import charts, tables
from orchestrrl.lab.sim.report_page.display_names import ARMS
from orchestrrl.lab.sim.report_page.groups import ArmGroup, groups_of
from orchestrrl.lab.sim.report_page.naming import scenario_names
from orchestrrl.lab.sim.report_page.style import CSS
from orchestrrl.lab.sim.rl.results import ClusterResult, digest_of

NOTHING = '<p class="note">Nothing of this is in the results.</p>'
OPEN_TIME_LINES = 4  # the others are folded

# Of an id in the page, its heading and what it says beside pictures.
SECTIONS = {
    "summary": (
        "Throughput",
        "Samples that are trained on per second, medians over seeds; the steps that warm up are left out.",
    ),
    "cost": ("Cost", "Components of the network at list prices, and what they buy."),
    "timeline": (
        "Time line",
        "What each part of the cluster does when, of the first seed. Scenarios of one name have one scale.",
    ),
    "stages": ("Stages", "Where the seconds of a step, of a training step and of a weight sync go."),
    "bandwidth": (
        "Bandwidth per tier",
        "Bytes of one stage over the seconds that one takes, all links of a tier together; up and down both count.",
    ),
    "remaining": ("Remaining requests", "Of the last generation step of the first seed."),
    "slack": (
        "Slack windows",
        "Time between two collectives over the network, in an optimiser step of one rank: circuits may change in it.",
    ),
    "staleness": ("Staleness", "Shares of samples by how many versions they were behind when they were trained on."),
    "scenarios": ("Scenarios", "As they were run, with every default filled in."),
}

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
    title = ", ".join(names) if len(names) <= 3 else f"{len(names)} scenarios"
    bodies = {
        "summary": tables.summary(groups) + _arms(groups) + _notes(groups),
        "timeline": _time_lines(groups),
        "stages": _stages(groups),
        "bandwidth": _pictures(groups, charts.tiers) + _folded("All figures", tables.tier_rates(groups)),
        "remaining": _pictures(groups, charts.remaining),
        "slack": _pictures(groups, charts.slack) + tables.slack(groups),
        "staleness": tables.staleness(groups),
        "cost": (charts.pareto(groups) or "") + tables.cost(groups),
        "scenarios": _scenarios(results),
    }
    sections = [_section(name, bodies[name]) for name in SECTIONS]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}: simulated clusters</title>",
            f"<style>{CSS}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(_what(results, groups))}</p>",
            *([f"<p>Made by <code>{escape(command)}</code>.</p>"] if command else []),
            _navigation(),
            *sections,
            "</body></html>\n",
        ]
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


def _navigation() -> str:
    links = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, (heading, _) in SECTIONS.items())
    return f"<nav><ul>{links}</ul></nav>"


def _section(name: str, body: str) -> str:
    heading, about = SECTIONS[name]
    return f'<section id="{name}"><h2>{escape(heading)}</h2><p>{escape(about)}</p>{body or NOTHING}</section>'


def _time_lines(groups: Sequence[ArmGroup]) -> str:
    until_s: dict[str, float] = {}  # what is compared is on one scale
    for group in groups:
        ends_s = [span.end_s for span in group.first.run.spans]
        until_s[group.family] = max([until_s.get(group.family, 0.0), *ends_s])
    drawn = [(group, charts.time_line(group.first.run, until_s[group.family])) for group in groups]
    shown = []
    for place, (group, picture) in enumerate((group, picture) for group, picture in drawn if picture):
        is_open = " open" if place < OPEN_TIME_LINES else ""
        title = escape(f"{group.title}, seed {group.first.run.seed}")
        shown.append(f"<details{is_open}><summary>{title}</summary>{picture}</details>")
    return "".join(shown)


def _stages(groups: Sequence[ArmGroup]) -> str:
    """Each part with its own picture, where it is told."""
    body = tables.stages(groups)
    for title, about, of in PARTS:
        having = [group for group in groups if of(group)]
        pictures = [charts.parts(title, [of(group) for group in some], some) for some in _cut(having, charts.PER_PARTS)]
        if any(pictures):
            told = f'<p class="note">{escape(about)}</p>' if about else ""
            body += f"<h3>{escape(title)}</h3>{told}" + "".join(filter(None, pictures))
    if told_steps := tables.steps(groups):
        body += f"<h3>A step of the loop, in the mean after the warm-up: stages may overlap</h3>{told_steps}"
    return body


def _pictures(groups: Sequence[ArmGroup], draw: Callable[[Sequence[ArmGroup]], str | None]) -> str:
    """One for the scenarios of each name, or several, each with as many groups as can be told apart."""
    return "".join(picture for some in _cut(groups) if (picture := draw(some)))


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


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def _scenarios(results: Sequence[ClusterResult]) -> str:
    documents: dict[str, Mapping[str, Any]] = {}
    seeds: dict[str, set[int]] = {}
    for result in results:
        digest = digest_of(result.scenario)
        documents.setdefault(digest, result.scenario)
        seeds.setdefault(digest, set()).add(result.run.seed)
    names = scenario_names(documents.values())
    shown = []
    for digest, document in documents.items():
        title = f"{names[digest]}, digest {digest}, {_list('seed', map(str, sorted(seeds[digest])))}"
        text = json.dumps(document, indent=1, ensure_ascii=False)
        shown.append(f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>")
    return "".join(shown)
