"""Results put together for a report: runs that differ in their seed alone, and which of them are worth their money.
Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from orchestrrl.sim.net.fabrics.base import Stage
from orchestrrl.sim.rl.results import Result, digest_of


@dataclass(frozen=True, slots=True)
class Group:
    """One arm on one fabric of one scenario. Pictures show the first seed, figures the median over all."""

    scenario: str  # its name, with its digest where several have that name
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

    def idle_share(self, stage: Stage) -> float | None:
        """None where no run says."""
        told = [result.run.idle_share[stage] for result in self.results if stage in result.run.idle_share]
        return median(told) if told else None

    def mean_step_s(self) -> dict[str, float]:
        """Seconds of a step in the mean over steps, by what they were spent on; the median over seeds."""
        names = sorted({name for result in self.results for row in result.run.steps for name in row})
        return {name: median(_mean(result.run.steps, name) for result in self.results) for name in names}


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows) if rows else 0.0


def groups_of(results: Iterable[Result]) -> tuple[Group, ...]:
    """In the order in which each first appears; seeds ascend."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = (digest_of(result.scenario), result.run.fabric, result.run.arm)
        found.setdefault(key, []).append(result)
    names = scenario_names([held[0].scenario for held in found.values()])
    return tuple(
        Group(names[digest], fabric, arm, tuple(sorted(held, key=lambda result: result.run.seed)), len(names) == 1)
        for (digest, fabric, arm), held in found.items()
    )


def scenario_names(scenarios: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By digest. Scenarios of one name are told apart by the beginnings of their digests."""
    told = {digest_of(scenario): str(scenario.get("name") or "scenario") for scenario in scenarios}
    shared = {name for name in told.values() if list(told.values()).count(name) > 1}
    return {digest: f"{name} {digest[:6]}" if name in shared else name for digest, name in told.items()}


def frontier(groups: Sequence[Group]) -> tuple[bool, ...]:
    """[group]: whether no other has at least its throughput for at most its dollars, and one of the two better."""
    points = [(group.network_usd, group.samples_per_s) for group in groups]
    return tuple(
        not any(usd <= own_usd and rate >= own_rate and (usd, rate) != (own_usd, own_rate) for usd, rate in points)
        for own_usd, own_rate in points
    )
