"""Build the fleets that a plan chooses from, each with its expected duration. Has no side effects.

Output lengths are unknown when requests are placed. Every family of fleets is therefore built with several length
estimates (the expected length, a long one, one sample), and every candidate is evaluated on all samples. A fleet that
is only good if particular requests are long performs badly in this evaluation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.model import Alternative, ConfigurationId, FleetPart
from planner.solver.candidates import (
    CandidateFleet,
    UnusableFleet,
    added_s,
    as_it_stands,
    homogeneous,
    longest,
    longest_first,
    rebalanced,
    solved,
)
from planner.solver.end_times import decode_s, ends_if_later_s
from planner.solver.from_snapshot import LiveFleet
from planner.solver.makespan import lower_bound, solve
from planner.solver.problem import Infeasible, MakespanProblem
from planner.workload.sampled_lengths import SampledLengths

REBALANCED, MIXED = "rebalanced", "mixed"
# Requests up to which the solver runs with every length estimate and every configuration.
SOLVED_BY_ALL = 2_048
# With more requests, a configuration is left out if it takes more than this many times the best one's GPU time.
FAR_MORE = 1.1
# The solver's fleet is dropped if it takes more than this many times the seconds of the best fleet built without it.
FOUND_OUT = 1.5

Try = Callable[[], CandidateFleet]
_SCREENED_S, TOTAL_S = attrgetter("screened_s"), attrgetter("total_s")


@dataclass(frozen=True, slots=True)
class FleetOption:
    """A candidate fleet with its duration in each sample, in seconds."""

    fleet: CandidateFleet
    decode_s: NDArray[np.float64]  # [sample, instance], corrected
    ends_s: NDArray[np.float64]  # [sample], costs included
    alternative: Alternative
    # Mean seconds to the end if the engines are changed at the next plan instead; only set for the best change.
    later_s: float | None = None

    @property
    def total_s(self) -> float:
        return self.alternative.total_s


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """All fleets that were considered for a plan.

    `bound_s` is a lower bound of the mean makespan of any fleet and placement, even if the lengths were known in
    advance.
    """

    current: FleetOption | None
    found: tuple[FleetOption, ...]  # the current one included
    ruled_out: tuple[Alternative, ...]
    bound_s: float


class _Member(NamedTuple):
    """A fleet of one family, with a rough estimate of the time in seconds until all its requests end."""

    screened_s: float
    estimate: int  # index of the length estimate that it was built with
    fleet: CandidateFleet


class _Family(NamedTuple):
    """The fleets of one kind, or the reason why no fleet of this kind could be built."""

    name: str
    configuration: ConfigurationId | None  # None if there are several
    members: Sequence[_Member]
    why_none: str


class _Weigher:
    """Evaluates all candidates on the same samples. `correction` multiplies decoding times, but not the costs of moving
    requests and changing engines."""

    def __init__(self, columns_context: NDArray[np.int64], lengths: SampledLengths, correction: float) -> None:
        self._context = columns_context
        self._lengths = lengths
        self._correction = correction

    def screen(self, fleet: CandidateFleet) -> float:
        """Return a rough estimate of the mean makespan in seconds, for comparing the members of one family."""
        ends_s = decode_s(fleet, self._context, self._lengths.samples, roughly=True) * self._correction
        return float((ends_s + fleet.migration_s + fleet.switch_s).max(axis=1, initial=0.0).mean())

    def tried(self, name: str, configuration: ConfigurationId | None, tries: Sequence[Try]) -> _Family:
        """Return the family of the fleets that `tries` build. A try that raises UnusableFleet or Infeasible contributes
        no fleet."""
        members, why = list[_Member](), ""
        for estimate, attempt in enumerate(tries):
            try:
                fleet = attempt()
            except (UnusableFleet, Infeasible) as error:
                why = why or str(error)
            else:
                members.append(_Member(self.screen(fleet), estimate, fleet))
        return _Family(name, configuration, members, why)

    def weigh(self, fleet: CandidateFleet) -> FleetOption:
        ends_s = decode_s(fleet, self._context, self._lengths.samples) * self._correction
        decoding_s = ends_s.max(axis=1, initial=0.0)
        moved_s = (ends_s + fleet.migration_s).max(axis=1, initial=0.0)
        total_s = (ends_s + fleet.migration_s + fleet.switch_s).max(axis=1, initial=0.0)
        makespan_s, with_moves_s = float(decoding_s.mean()), float(moved_s.mean())
        names = fleet.configurations
        parts = tuple(FleetPart(name, names.count(name)) for name in sorted(set(names)))
        return FleetOption(
            fleet,
            ends_s,
            total_s,
            Alternative(
                configuration=parts[0].configuration if len(parts) == 1 else None,
                instances=len(names),
                makespan_s=makespan_s,
                migration_cost_s=with_moves_s - makespan_s,
                redeploy_cost_s=float(total_s.mean()) - with_moves_s,
                name=fleet.name,
                decision=fleet.decision,
                low_s=float(total_s.min()),
                high_s=float(total_s.max()),
                parts=parts,
            ),
        )

    def with_later(self, option: FleetOption, current: FleetOption, fleet: LiveFleet, wait_s: float) -> FleetOption:
        """Return the option with `later_s` set to the mean makespan, in seconds, if the engines are changed after
        `wait_s`. In samples in which waiting and changing is slower than keeping the `current` fleet, the engines are
        not changed."""
        ends_s = ends_if_later_s(
            option.fleet, current.fleet, fleet.problem.requests, self._lengths.samples, wait_s, self._correction
        )
        return replace(option, later_s=float(np.minimum(ends_s, np.maximum(current.ends_s, wait_s)).mean()))


def consider(
    fleet: LiveFleet,
    lengths: SampledLengths,
    correction: float,
    only: ConfigurationId | None = None,
    wait_s: float = 0.0,
    *,
    only_as_deployed: bool = False,
) -> FleetOptions:
    """Build and evaluate all families of fleets.

    If `only` is given, fleets that change engines use only that configuration. `wait_s` is the time until the next
    plan; 0 means that there is no next plan. If `only_as_deployed` is True, no fleet changes engines. `correction`
    multiplies decoding times.
    """
    weigher = _Weigher(fleet.problem.requests.context_tokens, lengths, correction)
    estimated = [fleet.expecting(tokens) for tokens in _estimates(lengths)]
    current = weigher.weigh(as_it_stands(estimated[0])) if fleet.problem.current else None
    families = [weigher.tried(*family) for family in _dealt(estimated, only, only_as_deployed)]
    if only is None and fleet.problem.configurations and not only_as_deployed:
        dealt = min((member for family in families for member in family.members), key=_SCREENED_S, default=None)
        problems = _for_the_solver(estimated, dealt, correction)
        mixed = weigher.tried(MIXED, None, [partial(_mixed, each) for each in problems])
        families.append(mixed if len(problems) == len(estimated) else _unless_found_out(mixed, dealt))
    found = [] if current is None else [current]
    ruled_out = []
    for family in families:
        if family.members:
            found.append(weigher.weigh(min(family.members, key=_SCREENED_S).fleet))
        else:
            ruled_out.append(Alternative(family.configuration, 0, 0.0, 0.0, family.why_none, name=family.name))
    changing = min((option for option in found if option.fleet.decision == "reconfigure"), key=TOTAL_S, default=None)
    if current is not None and changing is not None and wait_s > 0:
        found = [
            option if option is not changing else weigher.with_later(changing, current, fleet, wait_s)
            for option in found
        ]
    bounds_s = _bounds_s([fleet.expecting(tokens).problem for tokens in lengths.samples])
    bound_s = float(np.mean(bounds_s)) * min(correction, 1.0) if bounds_s else 0.0
    return FleetOptions(current, tuple(found), tuple(ruled_out), bound_s)


def _estimates(lengths: SampledLengths) -> list[NDArray[np.int64]]:
    if len(lengths.samples) == 1:
        return [lengths.expected]
    return [lengths.expected, lengths.long, lengths.samples[0]]


def _dealt(
    estimated: Sequence[LiveFleet], only: ConfigurationId | None, only_as_deployed: bool
) -> Iterator[tuple[str, ConfigurationId | None, Sequence[Try]]]:
    """Yield the families that are built without the solver. Each has a name, a configuration (None if there are
    several), and one try per length estimate."""
    problem = estimated[0].problem
    ordered = [(fleet, longest(fleet.problem)) for fleet in estimated]
    if problem.current:
        yield REBALANCED, None, [partial(rebalanced, fleet, order) for fleet, order in ordered]
    for configuration in () if only_as_deployed else problem.configurations:
        if only in (None, configuration.id):
            instances = homogeneous(problem, configuration)
            tries = [partial(longest_first, fleet, order, configuration, instances) for fleet, order in ordered]
            yield f"{configuration.id} spread", configuration.id, tries


def _for_the_solver(estimated: Sequence[LiveFleet], dealt: _Member | None, correction: float) -> Sequence[LiveFleet]:
    """Return the fleets to solve, one per length estimate that is used.

    With few requests, or if `dealt` is None, all estimates are used. Otherwise, the only estimate is that of `dealt`,
    the best fleet built without the solver, and the only configurations are those that are efficient for at least one
    request. With any estimate, the solver either improves slightly on the `dealt` fleet or packs requests together that
    may turn out to be short. The other estimates therefore add little.
    """
    if len(estimated) == 1 or dealt is None or len(estimated[0].requests) <= SOLVED_BY_ALL:
        return estimated
    fleet = estimated[dealt.estimate]
    return [replace(fleet, problem=_narrowed(fleet.problem, dealt.screened_s / correction))]


def _unless_found_out(mixed: _Family, dealt: _Member | None) -> _Family:
    """Return the family `mixed`, but without its members if, on the samples, they finish far later than `dealt`, the
    best fleet built without the solver."""
    if dealt is None or not mixed.members or mixed.members[0].screened_s <= FOUND_OUT * dealt.screened_s:
        return mixed
    why = f"built for one estimate of the lengths, it ends in {mixed.members[0].screened_s:.0f} s over all samples"
    return mixed._replace(members=(), why_none=why)


def _narrowed(problem: MakespanProblem, within_s: float) -> MakespanProblem:
    """Return the problem without configurations on which every request takes far more GPU time than on another
    configuration.

    The GPU time of a request is estimated as in the solver's lower bound, from the share that the request takes of an
    instance that ends by `within_s`. Deployed configurations are always kept.
    """
    requests = problem.requests
    context, remaining = requests.context_tokens, requests.remaining_tokens
    footprint, shares = context + remaining, []
    for kind in problem.configurations:
        alone_s = kind.alpha_s * remaining
        seats = np.maximum(footprint / kind.kv_capacity_tokens, 1 / kind.max_sequences)
        work_s = kind.gpus * (added_s(kind.beta_s, kind.gamma_s, context, remaining) + alone_s * seats)
        usable = (footprint <= kind.kv_capacity_tokens) & (alone_s < within_s)
        shares.append(np.where(usable, work_s / np.where(usable, within_s - alone_s, 1.0), np.inf))
    share = np.array(shares)
    pays = ((share <= FAR_MORE * share.min(axis=0)) & np.isfinite(share)).any(axis=1)
    deployed = {instance.configuration for instance in problem.current}
    kept = tuple(
        kind for kind, wanted in zip(problem.configurations, pays, strict=True) if wanted or kind.id in deployed
    )
    return replace(problem, configurations=kept) if pays.any() else problem


def _mixed(fleet: LiveFleet) -> CandidateFleet:
    return solved(MIXED, fleet, solve(fleet.problem))


def _bounds_s(problems: Sequence[MakespanProblem]) -> list[float]:
    try:
        return [lower_bound(problem) for problem in problems]
    except Infeasible:
        return []
