"""Results put together for a report: runs that differ in their seed alone, and which of them are worth their money.
Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from orchestrrl.sim.net.fabrics.base import Stage
from orchestrrl.sim.rl.results import Result, digest_of

LONGEST = 60  # letters by which scenarios of one name are told apart
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
_ALIKE = re.compile(r"^\d+ x (\S+)$")
OF_GROUPS = ("seeds", "generation.arms")  # said by them already


@dataclass(frozen=True, slots=True)
class Group:
    """One arm on one fabric of one scenario. Pictures show the first seed, figures the median over all."""

    scenario: str  # its name, with what tells it from others of that name
    fabric: str
    arm: str
    results: tuple[Result, ...]  # by seed
    is_alone: bool = False  # no other scenario is in the report: its name goes without saying

    @property
    def title(self) -> str:
        own = [part for part in (self.fabric, self.arm) if part]
        return " · ".join(own if own and self.is_alone else [self.scenario, *own])

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(result.run.seed for result in self.results)

    @property
    def samples_per_s(self) -> float:
        return median(result.samples_per_s for result in self.results)

    @property
    def spread(self) -> tuple[float, float]:
        """Least and most samples per second."""
        rates = [result.samples_per_s for result in self.results]
        return min(rates), max(rates)

    @property
    def network_usd(self) -> float:
        return median(result.bill.network_usd for result in self.results)

    @property
    def total_usd(self) -> float:
        return median(result.bill.total_usd for result in self.results)

    @property
    def samples_per_s_per_musd(self) -> float:
        return median(result.samples_per_s_per_musd for result in self.results)

    @property
    def gen_phases_s(self) -> dict[str, float]:
        """Seconds by fleet. Engines of one kind go by its name alone, as those of a static fleet do."""
        found: dict[str, float] = {}
        for name, seconds in self.first.gen_phases_s.items():
            kind = _ALIKE.sub(r"\1", name)
            found[kind] = found.get(kind, 0.0) + seconds
        return found

    def idle_share(self, stage: Stage) -> float | None:
        """None where no run says."""
        told = [result.run.idle_share[stage] for result in self.results if stage in result.run.idle_share]
        return median(told) if told else None

    def mean_step_s(self) -> dict[str, float]:
        """Seconds of a step in the mean over steps after the warm-up, by what they were spent on; the median over
        seeds."""
        names = sorted({name for result in self.results for row in result.run.steps for name in row})
        return {name: median(_mean(_measured(result), name) for result in self.results) for name in names}


def _measured(result: Result) -> Sequence[Mapping[str, float]]:
    loop = result.scenario.get("loop")
    return result.run.steps[int(loop.get("warmup_steps", 0)) if isinstance(loop, Mapping) else 0 :]


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows) if rows else 0.0


def groups_of(results: Iterable[Result]) -> tuple[Group, ...]:
    """Scenarios by name, numbers in it by their size; fabrics and arms as they first appear; seeds ascend."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = (digest_of(result.scenario), result.run.fabric, result.run.arm)
        found.setdefault(key, []).append(result)
    names = scenario_names([held[0].scenario for held in found.values()])
    groups = [
        Group(names[digest], fabric, arm, tuple(sorted(held, key=lambda result: result.run.seed)), len(names) == 1)
        for (digest, fabric, arm), held in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: _in_order(group.scenario)))


def _in_order(name: str) -> list[tuple[float, str]]:
    """Words and numbers by turns."""
    parts = _NUMBER.split(name)
    return [(float(part), "") if place % 2 else (0.0, part) for place, part in enumerate(parts)]


def scenario_names(scenarios: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By digest. Those of one name are told apart by the values in which they differ; where that says too much, or
    nothing, by the beginnings of their digests. A name that all have goes without saying."""
    by_name: dict[str, dict[str, Mapping[str, Any]]] = {}
    for scenario in scenarios:
        by_name.setdefault(str(scenario.get("name") or "scenario"), {})[digest_of(scenario)] = scenario
    return {
        digest: f"{name} {told}".strip() if len(by_name) > 1 else told or name
        for name, some in by_name.items()
        for digest, told in _told_apart(some).items()
    }


def _told_apart(scenarios: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By digest; nothing where there is one alone."""
    if len(scenarios) == 1:
        return dict.fromkeys(scenarios, "")
    leaves = {digest: dict(_leaves(scenario, "")) for digest, scenario in scenarios.items()}
    paths = list(dict.fromkeys(path for each in leaves.values() for path in each))
    differ = [path for path in paths if len({each[path] for each in leaves.values() if path in each}) > 1]
    last = [path.rpartition(".")[2] for path in differ]
    short = {path: name if last.count(name) == 1 else path for path, name in zip(differ, last, strict=True)}
    told = {
        digest: ", ".join(f"{short[path]} {each[path]}" for path in differ if path in each)
        for digest, each in leaves.items()
    }
    if len(set(told.values())) == len(told) and max(map(len, told.values())) <= LONGEST:
        return told
    return {digest: digest[:6] for digest in scenarios}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, value) of all that a scenario says, but for which fabrics, arms and seeds it has."""
    if path in OF_GROUPS:
        return
    if path == "fabrics" and isinstance(value, list):
        for each in value:
            yield from _leaves(each.get("options", {}), str(each.get("name") or each.get("kind")))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and not all(isinstance(each, str | int | float) for each in value):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}[{index}]")
    else:
        yield path, "-".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def frontier(groups: Sequence[Group]) -> tuple[bool, ...]:
    """[group]: whether no other has at least its throughput for at most its dollars, and one of the two better. Where
    no price is known it is on none."""
    points = [(group.network_usd, group.samples_per_s) for group in groups if group.network_usd > 0]

    def leads(own_usd: float, own_rate: float) -> bool:
        return not any(
            usd <= own_usd and rate >= own_rate and (usd, rate) != (own_usd, own_rate) for usd, rate in points
        )

    return tuple(group.network_usd > 0 and leads(group.network_usd, group.samples_per_s) for group in groups)
