"""The fleets that a plan chooses from, each with what it is expected to take. Pure.

Who will draw a long answer is not known when requests are placed. So every family of fleets is tried with several
estimates of the lengths (what is expected, what is long, one sample), and what each candidate takes is judged on all
samples: an estimate that packs requests which merely might be long is found out there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.candidates import (
    Candidate,
    Unusable,
    as_it_stands,
    homogeneous,
    longest,
    longest_first,
    rebalanced,
    solved,
)
from planner.ends import decode_s, ends_if_later_s
from planner.lengths import Lengths
from planner.live import LiveFleet
from planner.makespan import lower_bound, solve
from planner.model import Alternative, ConfigurationId, FleetPart
from planner.problem import Infeasible, Problem

REBALANCED, MIXED = "rebalanced", "mixed"

MakeProblem = Callable[[NDArray[np.int64]], Problem]
Try = Callable[[], Candidate]


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate and its seconds over the samples."""

    fleet: Candidate
    decode_s: NDArray[np.float64]  # [sample, instance], corrected
    ends_s: NDArray[np.float64]  # [sample], costs included
    alternative: Alternative
    later_s: float | None = None  # until the end, in the mean, if engines are changed the next time round instead

    @property
    def total_s(self) -> float:
        return self.alternative.total_s


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that was considered. No fleet, and no placement even by the lengths of each sample, ends before
    `bound_s` in the mean."""

    current: Option | None
    found: tuple[Option, ...]  # the current one included
    ruled_out: tuple[Alternative, ...]
    bound_s: float


class _Weigher:
    """Judges candidates on the same samples. `correction` multiplies decoding seconds, never costs."""

    def __init__(self, columns_context: NDArray[np.int64], lengths: Lengths, correction: float) -> None:
        self._context = columns_context
        self._lengths = lengths
        self._correction = correction

    def screen(self, fleet: Candidate) -> float:
        """Seconds to the end, roughly: enough to tell the members of one family apart."""
        ends_s = decode_s(fleet, self._context, self._lengths.samples, roughly=True) * self._correction
        return float((ends_s + fleet.migration_s + fleet.switch_s).max(axis=1, initial=0.0).mean())

    def weigh(self, fleet: Candidate) -> Option:
        ends_s = decode_s(fleet, self._context, self._lengths.samples) * self._correction
        decoding_s = ends_s.max(axis=1, initial=0.0)
        moved_s = (ends_s + fleet.migration_s).max(axis=1, initial=0.0)
        total_s = (ends_s + fleet.migration_s + fleet.switch_s).max(axis=1, initial=0.0)
        makespan_s, with_moves_s = float(decoding_s.mean()), float(moved_s.mean())
        names = fleet.configurations
        parts = tuple(FleetPart(name, names.count(name)) for name in sorted(set(names)))
        return Option(
            fleet,
            ends_s,
            total_s,
            Alternative(
                configuration=parts[0].configuration if len(parts) == 1 else None,
                instances=len(names),
                makespan_s=makespan_s,
                migration_cost_s=with_moves_s - makespan_s,
                switch_cost_s=float(total_s.mean()) - with_moves_s,
                name=fleet.name,
                decision=fleet.decision,
                low_s=float(total_s.min()),
                high_s=float(total_s.max()),
                parts=parts,
            ),
        )

    def with_later(self, option: Option, current: Option, fleet: LiveFleet, wait_s: float) -> Option:
        """A change of engines can be made later: then fewer requests move."""
        if option.fleet.decision != "reconfigure":
            return option
        ends_s = ends_if_later_s(
            option.fleet, current.fleet, fleet.columns, self._lengths.samples, wait_s, self._correction
        )
        return replace(option, later_s=float(np.minimum(ends_s, np.maximum(current.ends_s, wait_s)).mean()))


def consider(
    fleet: LiveFleet,
    lengths: Lengths,
    problem: MakeProblem,
    correction: float,
    only: ConfigurationId | None = None,
    wait_s: float = 0.0,
) -> Options:
    """Every family of fleets; with `only`, those of that one configuration, as far as engines would change.
    `wait_s`: so long until they can be considered again; 0: never."""
    weigher = _Weigher(fleet.columns.context_tokens, lengths, correction)
    problems = [problem(tokens) for tokens in _estimates(lengths)]
    current = weigher.weigh(as_it_stands(problems[0], fleet)) if fleet.instances else None
    found = [] if current is None else [current]
    ruled_out: list[Alternative] = []
    for name, configuration, tries in _families(fleet, problems, only):
        best, why = _best(weigher, tries)
        if best is not None:
            found.append(best)
        else:
            ruled_out.append(Alternative(configuration, 0, 0.0, 0.0, why, name=name))
    if current is not None and wait_s > 0:
        found = [weigher.with_later(option, current, fleet, wait_s) for option in found]
    bounds_s = _bounds_s([problem(tokens) for tokens in lengths.samples])
    bound_s = float(np.mean(bounds_s)) * min(correction, 1.0) if bounds_s else 0.0
    return Options(current, tuple(found), tuple(ruled_out), bound_s)


def _estimates(lengths: Lengths) -> list[NDArray[np.int64]]:
    if len(lengths.samples) == 1:
        return [lengths.expected]
    return [lengths.expected, lengths.long, lengths.samples[0]]


def _families(
    fleet: LiveFleet, problems: Sequence[Problem], only: ConfigurationId | None
) -> Iterator[tuple[str, ConfigurationId | None, Sequence[Try]]]:
    """Name, configuration where there is but one, and the ways to find a good member."""
    ordered = [(made, longest(made)) for made in problems]
    if fleet.instances:
        yield REBALANCED, None, [partial(rebalanced, made, fleet, order) for made, order in ordered]
    for configuration in fleet.configurations:
        if only in (None, configuration.id):
            instances = homogeneous(problems[0], configuration)
            tries = [partial(longest_first, made, fleet, order, configuration, instances) for made, order in ordered]
            yield f"{configuration.id} spread", configuration.id, tries
    if only is None and fleet.configurations:
        yield MIXED, None, [partial(_mixed, made, fleet) for made in problems]


def _mixed(problem: Problem, fleet: LiveFleet) -> Candidate:
    return solved(MIXED, problem, fleet, solve(problem))


def _best(weigher: _Weigher, tries: Sequence[Try]) -> tuple[Option | None, str]:
    """The best member of a family; or why there is none."""
    members, why = list[Candidate](), ""
    for attempt in tries:
        try:
            members.append(attempt())
        except (Unusable, Infeasible) as error:
            why = why or str(error)
    if not members:
        return None, why
    return weigher.weigh(members[0] if len(members) == 1 else min(members, key=weigher.screen)), why


def _bounds_s(problems: Sequence[Problem]) -> list[float]:
    try:
        return [lower_bound(problem) for problem in problems]
    except Infeasible:
        return []
