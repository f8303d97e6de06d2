"""Group results for a report: merge seeds, label scenarios that have equal names, and define display names. The
functions have no side effects."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.net.model import LinkTier
from orchestrrl.lab.sim.rl.results import ClusterResult, digest_of, pareto
from orchestrrl.lab.sim.rl.training import RESPONSE_STREAM

LONGEST = 60  # maximum characters of the label that distinguishes scenarios of one name
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def scenario_names(scenarios: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the display name of each scenario, by digest. Scenarios that differ only in seeds, arms and the selection
    of fabrics get the same display name, so that results of several runs are merged. Other scenarios with the same name
    are distinguished by the values that differ, or by the beginning of their digests if these values are too long or
    equal. A name common to all scenarios is omitted."""
    documents = {digest_of(scenario): scenario for scenario in scenarios}
    distinct = {digest: _distinguishing(each, _clashing(documents.values())) for digest, each in documents.items()}
    by_name: dict[str, dict[str, Mapping[str, Any]]] = {}
    for each in distinct.values():
        by_name.setdefault(str(each.get("name") or "scenario"), {})[digest_of(each)] = each
    names = {
        digest: f"{name} {label}".strip() if len(by_name) > 1 else label or name
        for name, some in by_name.items()
        for digest, label in _distinguished(some).items()
    }
    return {digest: names[digest_of(each)] for digest, each in distinct.items()}


def in_order(name: str) -> list[tuple[float, str]]:
    """Return a key for sorting names in which numbers compare by value."""
    parts = _NUMBER.split(name)
    return [(float(part), "") if place % 2 else (0.0, part) for place, part in enumerate(parts)]


def _clashing(scenarios: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the fabrics that have different options in different scenarios."""
    found: dict[str, set[str]] = {}
    for scenario in scenarios:
        for title, section in _fabrics(scenario).items():
            found.setdefault(title, set()).add(json.dumps(section, sort_keys=True))
    return {title for title, sections in found.items() if len(sections) > 1}


def _fabrics(scenario: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    sections = scenario.get("fabrics")
    return {str(each.get("name") or each.get("kind")): each for each in sections} if isinstance(sections, list) else {}


def _distinguishing(scenario: Mapping[str, Any], clashing: Iterable[str]) -> dict[str, Any]:
    """Return the fields that can distinguish a scenario, including the options of the fabrics in `clashing`."""
    found = {name: value for name, value in scenario.items() if name not in ("seeds", "fabrics")}
    if isinstance(generation := found.get("generation"), Mapping):
        found["generation"] = {name: value for name, value in generation.items() if name != "arms"}
    fabrics = _fabrics(scenario)
    return found | {title: fabrics[title].get("options", {}) for title in sorted(clashing) if title in fabrics}


def _distinguished(scenarios: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Map each scenario's digest to a label that distinguishes it from the other scenarios. The label of a single
    scenario is empty."""
    if len(scenarios) == 1:
        return dict.fromkeys(scenarios, "")
    leaves = {digest: dict(_leaves(scenario, "")) for digest, scenario in scenarios.items()}
    paths = list(dict.fromkeys(path for each in leaves.values() for path in each))
    differ = [path for path in paths if len({each[path] for each in leaves.values() if path in each}) > 1]
    last = [path.rpartition(".")[2] for path in differ]
    short = {path: name if last.count(name) == 1 else path for path, name in zip(differ, last, strict=True)}
    labels = {
        digest: ", ".join(f"{short[path]} {each[path]}" for path in differ if path in each)
        for digest, each in leaves.items()
    }
    if len(set(labels.values())) == len(labels) and max(map(len, labels.values())) <= LONGEST:
        return labels
    return {digest: digest[:6] for digest in scenarios}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the value of each leaf of a document, both as text. `path` is the path of the document itself.
    A list of numbers or texts is one leaf."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and not all(isinstance(each, str | int | float) for each in value):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}[{index}]")
    else:
        yield path, "-".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# Display names, in the order of display.
STAGES: Mapping[str, str] = {
    FabricStage.GEN: "generation",
    RESPONSE_STREAM: "answers to training",
    FabricStage.TRAIN: "training",
    FabricStage.WEIGHT_SYNC: "weight sync",
}
TIERS: Mapping[str, str] = {
    LinkTier.NVLINK: "NVLink",
    LinkTier.NIC: "server to ToR",
    LinkTier.AGG: "ToR to ToR in a PoD",
    LinkTier.CORE: "PoD to PoD",
    LinkTier.DIRECT: "circuits between NICs",
}
LANES: Mapping[str, str] = {"gen": "generation", "sync": "weight sync", "train": "training", "fault": "faults"}
OF_A_STEP: Mapping[str, str] = {
    "gen_s": "generation",
    "gen_waits_weights_s": "engines wait for weights",
    "gen_waits_room_s": "engines wait for room",
    "sync_s": "weight sync",
    "train_s": "training",
    "train_log_probs_s": "of which log-probabilities",
    "train_held_s": "training delayed by weight sync",
    "gen_held_s": "generation delayed by weight sync",
    "train_waits_samples_s": "trainer waits for samples",
    "train_waits_sync_s": "trainer waits for weight sync",
}
ARMS: Mapping[str, str] = {
    "verl_to": "static fleet of the best configuration, round-robin prompts",
    "verl_lo": "static fleet of the widest engines, round-robin prompts",
    "partial_rollout": "as verl_to, but a step ends early and unfinished requests continue in the next",
    "planning": "OrchestrRL's planner only",
    "balancing": "OrchestrRL's balancer only",
    "balancing_paper": "OrchestrRL's balancer only, with the paper's rule for moves",
    "both": "OrchestrRL's planner and balancer",
    "both_paper": "OrchestrRL's planner and balancer, with the paper's rule for moves",
    "mean_only": "as both, with a forecast of the mean length only",
    "oracle": "as both, with all lengths known to the planner",
    "packed_known": "the best static fleet, packed with all lengths known",
    "prompts_known": "the best static fleet, with the distribution of each prompt's lengths known",
}


def display_name(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name.replace("_", " "))


def rank(names: Mapping[str, str], name: str) -> tuple[int, str]:
    """Return a sort key that puts the keys of `names` first, in their order, and other names after them."""
    order = list(names)
    return (order.index(name) if name in names else len(order), name)


def number(value: float) -> str:
    """Format a number with about four significant digits, and with thousands separators."""
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


_ALIKE = re.compile(r"^\d+ x (\S+)$")


@dataclass(frozen=True, slots=True)
class ArmGroup:
    """The results of one arm on one fabric in one scenario. Charts show the first seed. Throughput and cost are medians
    over seeds."""

    scenario: str  # display name, unique in the report
    fabric: str
    arm: str
    results: tuple[ClusterResult, ...]  # by seed
    is_alone: bool = False  # the only scenario of the report, whose name is omitted from titles

    @property
    def title(self) -> str:
        own = [part for part in (self.fabric, self.arm) if part]
        return " · ".join(own if own and self.is_alone else [self.scenario, *own])

    @property
    def family(self) -> str:
        """The scenario's own name. Groups with the same name, such as the points of a sweep, are compared with each
        other."""
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
        """The minimum and the maximum throughput over the seeds, in samples per second."""
        rates = [result.samples_per_s for result in self.results]
        return min(rates), max(rates)

    @property
    def network_usd(self) -> float:
        return median(result.bill.network_usd for result in self.results)

    @property
    def samples_per_s_per_musd(self) -> float:
        return median(result.samples_per_s_per_musd for result in self.results)

    @property
    def gen_phases_s(self) -> dict[str, float]:
        """The time, in seconds, for which each fleet runs in the last generation step of the first seed. A uniform
        fleet is named by its configuration, without the number of engines."""
        found: dict[str, float] = {}
        for name, seconds in self.first.gen_phases_s.items():
            kind = _ALIKE.sub(r"\1", name)
            found[kind] = found.get(kind, 0.0) + seconds
        return found

    def idle_share(self, stage: FabricStage) -> float | None:
        """Return the idle fraction of a stage's GPUs, as the median over seeds. Return None if no run reports this
        fraction."""
        shares = [result.run.idle_share[stage] for result in self.results if stage in result.run.idle_share]
        return median(shares) if shares else None

    def mean_step_s(self) -> dict[str, float]:
        """Return the time, in seconds, that each activity takes in a step. It is the median over seeds of the mean over
        the steps after the warm-up."""
        loop = self.first.scenario.get("loop")
        warmup_steps = int(loop.get("warmup_steps", 0)) if isinstance(loop, Mapping) else 0
        measured = [result.run.steps[warmup_steps:] for result in self.results]
        names = sorted({name for result in self.results for row in result.run.steps for name in row})
        return {
            name: median(sum(row.get(name, 0.0) for row in rows) / max(1, len(rows)) for rows in measured)
            for name in names
        }


def groups_of(results: Sequence[ClusterResult]) -> tuple[ArmGroup, ...]:
    """Group results by scenario, fabric and arm. Groups are ordered by scenario name, with numbers compared by value,
    and within a scenario in the order in which they first appear. The results of a group are ordered by seed. If a seed
    occurs more than once, its first result is used."""
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
    """Return whether each group is on the Pareto frontier. A group is on the frontier if no other group is at least as
    good in both throughput and network cost, and better in one of them. Groups without a price are never on the
    frontier."""
    priced = [group for group in groups if group.network_usd > 0]
    best = iter(pareto([(group.network_usd, group.samples_per_s) for group in priced]))
    return tuple(group.network_usd > 0 and next(best) for group in groups)
