"""Render a redeployment as text and tables: its plan, progress, durations and timeline."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrrl.cli.formats import count, duration, ranges, time_of_day
from orchestrrl.cli.output import Columns, cells_table, row_of
from orchestrrl.core.errors import cut

_NUMBERED = re.compile(r"(|.*\D)(0|[1-9][0-9]*)", re.DOTALL)
NAMED = 4  # engines named in a list; further engines are only counted
ENGINES_SHOWN = 24  # rows; with more, engines of the same configuration share a row
BARS_SHOWN = 48  # bars of a time line; with more, steps of the same kind in a stage share a bar
LINE_WIDTH = 60
REMARK_CHARACTERS = 200

CUT_SHORT = "cut short"  # the daemon's detail of a step that ended because another step failed

COLOURS = {"running": "cyan", "done": "green", "failed": "red", "planned": "cyan", "degraded": "red"}


def fleet_text(engines: Sequence[dict[str, Any]]) -> str:
    """Return the number of engines per configuration, such as `8 x tp2, 1 x tp4`."""
    kinds = Counter(engine["configuration"] or "unknown" for engine in engines)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "nothing"


def change_text(report: dict[str, Any]) -> str:
    """Return the engines before and after the redeployment, such as `8 x tp2 -> 2 x tp8`."""
    return f"{fleet_text(report['old_engines'])} -> {fleet_text(report['new_engines'])}"


def spaced(name: str) -> str:
    """Return a name such as `load_weights` with spaces instead of underscores."""
    return name.replace("_", " ")


def elapsed_s(report: dict[str, Any]) -> float | None:
    """Return the time in seconds from the redeployment's start to its end, or None while it runs."""
    ended = report["ended_unix_s"]
    return None if ended is None else float(max(0.0, ended - report["created_unix_s"]))


def begun(report: dict[str, Any]) -> str:
    """Return one line with the redeployment's id, change of engines, plan and reason."""
    named = f"redeployment {report['redeployment_id']}" if report["redeployment_id"] else "dry run, nothing changes"
    plan = f", plan {report['plan_id']}" if report["plan_id"] else ""
    reason = f" ({report['reason']})" if report["reason"] else ""
    return f"[bold]{escape(named)}[/bold]: {escape(change_text(report) + plan + reason)}"


def outcome(report: dict[str, Any]) -> list[str]:
    """Return lines about the state of the redeployment and its effect on requests."""
    state = spaced(report["state"])
    colour = COLOURS.get(state, "yellow")
    took = elapsed_s(report)
    lines = [f"[{colour}]{state}[/{colour}]" + ("" if took is None else f" in {duration(took)}")]
    if report["detail"]:
        lines[0] += f": {escape(report['detail'])}"
    if report["state"] == "degraded":
        lines.append(escape(f"serving: {_named(report['engine_ids']) or 'nothing'}"))
    still = report["closed_s"]
    moved, parked = report["requests_moved"], report["requests_parked"]
    if moved or parked:
        stood = "" if still is None else f" of stopped engines paused for at most {duration(still)}"
        lines.append(f"requests{stood}: {count(moved)} moved, {count(parked)} held by their gateway")
    return lines


def progress(report: dict[str, Any]) -> str:
    """Return a line about a running redeployment, such as `redeployment s1: 8 x tp2 -> 2 x tp8, running: evacuate
    (...)`."""
    steps = report["steps"]
    done = sum(step["state"] == "done" for step in steps)
    now = ", ".join(dict.fromkeys(spaced(step["kind"]) for step in steps if step["state"] == "running"))
    back = any(step["direction"] == "back" for step in steps)
    going = "[yellow]rolling back[/yellow]" if back else "running"
    doing = f": {now}" if now else ""
    return (
        f"redeployment [bold]{escape(report['redeployment_id'])}[/bold]: {escape(change_text(report))},"
        f" {going}{doing} "
        f"({done} of {len(steps)} steps done, since {time_of_day(report['created_unix_s'])})"
    )


def redeployment_summary(report: dict[str, Any] | None) -> list[str]:
    """Return a list with the line that `orchestrrl status` shows about a redeployment. The list is empty if `report` is
    None."""
    if report is None:
        return []
    if report["state"] == "running":
        return [progress(report)]
    return [f"redeployment [bold]{escape(report['redeployment_id'])}[/bold]: {outcome(report)[0]}"]


# --- engines


def engines_table(report: dict[str, Any]) -> Table:
    """Return a table of the engines that stop, stay and start. If there are many engines, engines of the same
    configuration share a row."""
    return cells_table("Engines", ("engine", "", "configuration", "GPUs"), _engine_rows(report))


def _engine_rows(report: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    old, new = ({engine["engine_id"] for engine in report[name]} for name in ("old_engines", "new_engines"))
    fated = [("stops", engine) for engine in report["old_engines"] if engine["engine_id"] not in new]
    fated += [("stays", engine) for engine in report["new_engines"] if engine["engine_id"] in old]
    fated += [("starts", engine) for engine in report["new_engines"] if engine["engine_id"] not in old]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for fate, engine in fated:
        own = engine["engine_id"] if len(fated) <= ENGINES_SHOWN else ""
        groups.setdefault((fate, str(engine["configuration"]), own), []).append(engine)
    for (fate, configuration, _), group in groups.items():
        gpus = ranges(sorted(gpu for engine in group for gpu in engine["gpus"]))
        yield _named([engine["engine_id"] for engine in group]), fate, configuration, gpus


def _named(ids: Sequence[str]) -> str:
    """Return engine ids as text, such as `e0, x`. More than two ids that differ only in a trailing number are shown as
    ranges, such as `s17-2.0-3`. Other long lists are cut."""
    numbered = [_NUMBERED.fullmatch(id) for id in ids]
    found = [match for match in numbered if match is not None]
    if len(ids) > 2 and len(found) == len(ids) and len({match[1] for match in found}) == 1:
        return f"{found[0][1]}{ranges(sorted(int(match[2]) for match in found))}"
    if len(ids) <= NAMED:
        return ", ".join(ids)
    return f"{', '.join(ids[: NAMED - 1])} and {len(ids) - NAMED + 1} more"


# --- steps


@dataclass(frozen=True, slots=True)
class StageSteps:
    """The steps of one kind in one stage. These steps, or the chains of steps that contain them, run in parallel.
    `direction` is `back` for steps of a rollback."""

    direction: str
    stage: int
    kind: str
    steps: tuple[dict[str, Any], ...]

    @property
    def name(self) -> tuple[str, str]:
        """The stage and the kind of step as text, such as `2 back` and `load weights`."""
        return f"{self.stage} back" if self.direction == "back" else str(self.stage), spaced(self.kind)

    @property
    def engines(self) -> list[str]:
        return [step["engine_id"] for step in self.steps if step["engine_id"]]

    @property
    def state(self) -> str:
        """The combined state of the steps. If their states differ, it is `failed` if a step failed, otherwise `running`
        if a step is running or pending, and otherwise `skipped`."""
        states = {step["state"] for step in self.steps}
        if len(states) == 1:
            return str(*states)
        for state in ("failed", "running"):
            if state in states:
                return state
        return "running" if "pending" in states else "skipped"

    @property
    def state_text(self) -> str:
        if len({step["state"] for step in self.steps}) == 1:
            return self.state
        done = sum(step["state"] == "done" for step in self.steps)
        prefix = f"{self.state}, " if self.state in ("running", "failed") else ""
        return f"{prefix}{done} of {len(self.steps)} done"

    @property
    def began_s(self) -> float | None:
        return min((step["began_unix_s"] for step in self.steps if step["began_unix_s"] is not None), default=None)

    def ended_s(self, now_s: float) -> float | None:
        """Return the Unix time in seconds at which the last started step ended. Return `now_s` while a step runs, and
        None if no end was recorded."""
        ends = [
            now_s if step["state"] == "running" else step["began_unix_s"] + step["elapsed_s"]
            for step in self.steps
            if step["state"] == "running" or step["elapsed_s"] is not None
        ]
        return max(ends, default=None)

    def elapsed_text(self, now_s: float | None = None) -> str | None:
        """Return, as text, the duration from the start of the first step to the end of the last step or, while a step
        runs, to `now_s`. Return None if the start or the end is unknown."""
        began_s = self.began_s
        if began_s is None or (now_s is None and any(step["state"] == "running" for step in self.steps)):
            return None
        ended_s = self.ended_s(began_s if now_s is None else now_s)
        return None if ended_s is None else duration(max(0.0, ended_s - began_s))

    @property
    def text(self) -> str:
        return _named(self.engines) or "the fleet"

    @property
    def slowest(self) -> str | None:
        """The engine and duration of the slowest step as text, or None if there is only one step or no step has
        ended."""
        taken = [step for step in self.steps if step["elapsed_s"] is not None]
        slowest = max(taken, key=lambda step: step["elapsed_s"], default=None)
        return f"{slowest['engine_id']} {duration(slowest['elapsed_s'])}" if slowest and len(self.steps) > 1 else None

    @property
    def remark(self) -> str:
        """One line with the detail of the most relevant step, and the number of steps with other details. Failed steps
        are the most relevant."""
        detailed = [step for step in self.steps if step["detail"]]
        detailed.sort(key=lambda step: (step["state"] != "failed", step["detail"] == CUT_SHORT))
        if not detailed:
            return ""
        first = detailed[0]
        detail = cut(" ".join(first["detail"].split()), REMARK_CHARACTERS)
        others = sum(step["detail"] != first["detail"] for step in detailed)
        if not others and len(detailed) == len(self.steps):
            return f"each: {detail}" if len(detailed) > 1 else detail
        named = f"{first['engine_id']}: " if first["engine_id"] and not detail.startswith(first["engine_id"]) else ""
        return f"{named}{detail}{f' (and {others} more)' if others else ''}"


def together(report: dict[str, Any]) -> list[StageSteps]:
    """Return the steps in the order of the report, grouped by direction, stage and kind."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for step in report["steps"]:
        groups.setdefault((step["direction"], step["stage"], step["kind"]), []).append(step)
    return [StageSteps(*key, tuple(steps)) for key, steps in groups.items()]


def plan_table(report: dict[str, Any]) -> Table:
    """Return a table of the planned steps by stage."""
    columns: Columns = {
        "engines": "text",
        "in parallel": lambda group: len(group.steps) if group.engines else None,
        "timeout": lambda group: duration(max(float(step["within_s"]) for step in group.steps)),
    }
    return _staged_table("Steps", columns, together(report))


def taken_table(report: dict[str, Any], now_s: float | None = None) -> Table:
    """Return a table of the steps with their state and duration. After the redeployment has ended, only steps that were
    started are included."""
    columns: Columns = {
        "engines": "text",
        "state": "state_text",
        "took": lambda group: group.elapsed_text(now_s),
        "slowest": "slowest",
        "remark": "remark",
    }
    groups = (each for each in together(report) if report["state"] == "running" or each.began_s is not None)
    return _staged_table("Steps", columns, groups)


def _staged_table(
    title: str, columns: Columns, groups: Iterable[StageSteps], last: Iterable[tuple[object, ...]] = ()
) -> Table:
    """Return a table with a row for each group, followed by the rows in `last`. Each stage is shown only in its first
    row."""
    rows: list[tuple[object, ...]] = [
        (" " if place else stage, group.name[1], *row_of(group, columns))
        for stage, of_stage in groupby(groups, key=lambda group: group.name[0])
        for place, group in enumerate(of_stage)
    ]
    return cells_table(title, ("stage", "step", *columns), [*rows, *last])


# --- while it runs


def picture(report: dict[str, Any]) -> RenderableType:
    """Return the state of the redeployment for display in a terminal. The display is refreshed while the redeployment
    runs."""
    last = progress(report) if report["state"] == "running" else "\n".join(outcome(report))
    return Group(Text.from_markup(begun(report)), taken_table(report, time.time()), Text.from_markup(last))


def news(before: dict[str, Any] | None, report: dict[str, Any]) -> Iterator[str]:
    """Yield a line with rich markup for each change since the report `before`, or since the start if `before` is
    None."""
    states = {} if before is None else {group.name: group.state for group in together(before)}
    if before is None:
        yield begun(report)
    for group in together(report):
        if group.state not in (states.get(group.name, "pending"), "skipped"):
            yield _news_of(group)


def _news_of(group: StageSteps) -> str:
    back = " back" if group.direction == "back" else ""
    engines = f" {_named(group.engines)}" if group.engines else ""
    line = f"{spaced(group.kind)}{back}{engines}: {group.state}"
    at_s, took = group.began_s, group.elapsed_text()
    if group.state in ("done", "failed") and at_s is not None:
        at_s = group.ended_s(at_s) or at_s
        line += f"{' after' if group.state == 'failed' else ' in'} {took}" if took else ""
        line += f": {group.remark}" if group.remark else ""
    return escape(line if at_s is None else f"{time_of_day(at_s)} {line}")


# --- time line


def time_line(report: dict[str, Any], now_s: float) -> Table:
    """Return a table with a bar for each started step. The timeline extends from the redeployment's start to its end
    or, while it runs, to `now_s`. If there are many steps, steps of the same kind in a stage share a bar."""
    created_s = float(report["created_unix_s"])
    bars = [StageSteps(step["direction"], step["stage"], step["kind"], (step,)) for step in report["steps"]]
    if sum(bar.began_s is not None for bar in bars) > BARS_SHOWN:
        bars = together(report)
    bars = [bar for bar in bars if bar.began_s is not None]
    last_s = report["ended_unix_s"] or (now_s if report["state"] == "running" else created_s)
    whole_s = max([last_s, *(bar.ended_s(now_s) or 0.0 for bar in bars)]) - created_s

    def line(low_s: float, high_s: float) -> str:
        """Return a bar from `low_s` to `high_s` on a timeline of `whole_s` seconds. An interval of no length is shown
        as a tick."""
        if whole_s <= 0:
            return "▏"
        low = min(LINE_WIDTH - 1, max(0, round((low_s - created_s) / whole_s * LINE_WIDTH)))
        high = min(LINE_WIDTH, max(low, round((high_s - created_s) / whole_s * LINE_WIDTH)))
        return " " * low + ("█" * (high - low) or "▏")

    columns: Columns = {
        "engine": "text",
        f"0 s{duration(whole_s):>{LINE_WIDTH - 3}}": lambda bar: line(bar.began_s, bar.ended_s(now_s) or bar.began_s),
        "took": lambda bar: bar.elapsed_text(now_s),
    }
    fence_s = next((step["began_unix_s"] for step in report["steps"] if step["kind"] == "fence"), None)
    still: list[tuple[object, ...]] = []
    if (closed_s := report["closed_s"]) is not None and fence_s is not None:
        still.append((" ", "requests paused", " ", line(fence_s, fence_s + closed_s), duration(closed_s)))
    return _staged_table("Time line", columns, bars, still)
