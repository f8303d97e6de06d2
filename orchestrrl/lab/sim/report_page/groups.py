"""Results put together for a report: runs that differ in their seed alone, and which of them are worth their money.
Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.report_page.naming import in_order, scenario_names
from orchestrrl.lab.sim.rl.results import ClusterResult, digest_of, pareto

_ALIKE = re.compile(r"^\d+ x (\S+)$")


@dataclass(frozen=True, slots=True)
class ArmGroup:
    """One arm on one fabric of one scenario. Pictures show the first seed, figures the median over all."""

    scenario: str  # its name, with what tells it from others of that name
    fabric: str
    arm: str
    results: tuple[ClusterResult, ...]  # by seed
    is_alone: bool = False  # no other scenario is in the report: its name goes without saying

    @property
    def title(self) -> str:
        own = [part for part in (self.fabric, self.arm) if part]
        return " · ".join(own if own and self.is_alone else [self.scenario, *own])

    @property
    def family(self) -> str:
        """Scenarios of one name, such as the points of a sweep, are compared with each other."""
        return str(self.first.scenario.get("name") or "scenario")

    @property
    def first(self) -> ClusterResult:
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

    def idle_share(self, stage: FabricStage) -> float | None:
        """None where no run says."""
        told = [result.run.idle_share[stage] for result in self.results if stage in result.run.idle_share]
        return median(told) if told else None

    def mean_step_s(self) -> dict[str, float]:
        """Seconds of a step in the mean over steps after the warm-up, by what they were spent on; the median over
        seeds."""
        names = sorted({name for result in self.results for row in result.run.steps for name in row})
        return {name: median(_mean(_measured(result), name) for result in self.results) for name in names}


def _measured(result: ClusterResult) -> Sequence[Mapping[str, float]]:
    loop = result.scenario.get("loop")
    return result.run.steps[int(loop.get("warmup_steps", 0)) if isinstance(loop, Mapping) else 0 :]


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows) if rows else 0.0


def groups_of(results: Sequence[ClusterResult]) -> tuple[ArmGroup, ...]:
    """Scenarios by name, numbers in it by their size; fabrics and arms as they first appear; seeds ascend. Of a seed
    that was run more than once the first run."""
    names = scenario_names([result.scenario for result in results])
    found: dict[tuple[str, str, str], dict[int, ClusterResult]] = {}
    for result in results:
        key = (names[digest_of(result.scenario)], result.run.fabric, result.run.arm)
        found.setdefault(key, {}).setdefault(result.run.seed, result)
    is_alone = len(set(names.values())) == 1
    groups = [
        ArmGroup(name, fabric, arm, tuple(of_seed[seed] for seed in sorted(of_seed)), is_alone)
        for (name, fabric, arm), of_seed in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: in_order(group.scenario)))


def frontier(groups: Sequence[ArmGroup]) -> tuple[bool, ...]:
    """[group]: whether no other has at least its throughput for at most its dollars, and one of the two better. Where
    no price is known it is on none."""
    priced = [group for group in groups if group.network_usd > 0]
    best = iter(pareto([(group.network_usd, group.samples_per_s) for group in priced]))
    return tuple(group.network_usd > 0 and next(best) for group in groups)
