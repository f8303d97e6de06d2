"""Plan how to change one set of cross-connects into another in stages, so that pairs and endpoints keep circuits as far
as possible. Has no side effects.

In each stage, circuits are removed before circuits are added. Cross-connects in both sets are never touched, and only
cross-connects of the two sets are used. The plan minimises, in this order, the number of pairs that go dark, the number
of endpoints that fall below their minimum ("thin"), and the number of stages. `orchestrrl/fabric/stage_commit.py`
commits a stage.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, PortPair, shared_ports
from planner.fabric.transition_exact import fewest_missed, fewest_stages
from planner.fabric.transition_moves import Subject, TransitionMoves, circuits, lit_floors, moves_between, subjects
from planner.fabric.transition_order import RemovalOrder, doomed, replayed
from planner.fabric.transition_stages import StageOf, packed, smoothed, stages_at_least

PointKind = Literal["start", "removed", "added"]


@dataclass(frozen=True, slots=True)
class TransitionProblem:
    """The current and target cross-connects, with limits. At least the share `min_fraction` of an endpoint's circuits,
    rounded down, should stay up. The share refers to the endpoint's circuits before or after the transition, whichever
    are fewer."""

    cabling: Cabling
    current: frozenset[PortPair]
    target: frozenset[PortPair]
    max_moves_per_stage: int  # removals plus additions
    min_fraction: float

    def __post_init__(self) -> None:
        if self.max_moves_per_stage < 1:
            raise ValueError(f"max_moves_per_stage must be >= 1, got {self.max_moves_per_stage}")
        if not 0 <= self.min_fraction <= 1:
            raise ValueError(f"min_fraction must be within 0..1, got {self.min_fraction}")
        for name, cross_connects in (("current", self.current), ("target", self.target)):
            circuits(self.cabling, cross_connects)
            if twice := [f"port {port} of {switch}" for switch, port in shared_ports(cross_connects)]:
                raise ValueError(f"{name} must use each port at most once, got several uses of {', '.join(twice)}")


@dataclass(frozen=True, slots=True)
class TransitionStage:
    """One stage of a transition: first the removals, then the additions."""

    remove: tuple[PortPair, ...]
    add: tuple[PortPair, ...]

    @property
    def switches(self) -> frozenset[OcsId]:
        return frozenset(pair.switch for pair in (*self.remove, *self.add))


@dataclass(frozen=True, slots=True)
class Transition:
    """The stages of a transition and their side effects.

    `dark_pairs` have circuits before and after the transition, but none at some point during it. `thin_endpoints` have
    fewer circuits than their minimum at some point. No transition has fewer than `stages_at_least` stages, unless more
    pairs go dark or more endpoints become thin. `fewest_suffer` states whether it is proven that no order makes fewer
    pairs dark or, with as few dark pairs, fewer endpoints thin.
    """

    stages: tuple[TransitionStage, ...]
    dark_pairs: tuple[Pair, ...]
    thin_endpoints: tuple[EndpointId, ...]
    stages_at_least: int
    fewest_suffer: bool


@dataclass(frozen=True, slots=True)
class CircuitsUp:
    """The number of circuits at one point of a transition, for each pair and endpoint that has circuits before or after
    the transition. `kind` states whether the point is the start or follows the removals or the additions of `stage`."""

    stage: int
    kind: PointKind
    pairs: Mapping[Pair, int]
    endpoints: Mapping[EndpointId, int]


def transition(problem: TransitionProblem) -> Transition:
    """Plan a transition with the fewest dark pairs, then the fewest thin endpoints, then the fewest stages. The result
    is provably optimal for small problems and close to optimal otherwise. Equal problems always give the same
    result."""
    moves = moves_between(problem.cabling, problem.current, problem.target, problem.min_fraction)
    order, proven = fewest_missed(moves)
    spared = _not_to_count_on(moves, order)
    stage_of, at_least = _staged(problem.max_moves_per_stage, moves, order, spared)
    return _transition(problem, moves, stage_of, at_least, proven)


def _not_to_count_on(moves: TransitionMoves, order: RemovalOrder) -> frozenset[int]:
    """Return the numbers of the floors (minimum circuit counts) that an order as good as `order` may miss. These
    include the floors that every order misses. If `order` also misses the floor of a pair that some other order keeps,
    the floors of all pairs are included. The same applies to endpoints."""
    hopeless = doomed(moves)
    chosen = {moves.floors[number].is_pair for number in order.missed - hopeless}
    return hopeless | {number for number, floor in enumerate(moves.floors) if floor.is_pair in chosen}


def _staged(max_moves: int, moves: TransitionMoves, order: RemovalOrder, spared: frozenset[int]) -> tuple[StageOf, int]:
    if not moves.count:
        return [], 0
    at_least = stages_at_least(moves, max_moves, spared)
    orders = [order]
    if not order.missed:
        orders.append(replayed(moves, sorted(order.removals)))
    usable = [each for each in orders if not each.missed - order.missed]
    best = min((packed(moves, each, max_moves, by_chains=how) for each in usable for how in (False, True)), key=max)
    if max(best) + 1 > at_least:
        fewer, at_least = fewest_stages(moves, max_moves, order.cost(moves), at_least, best, max(best) + 1)
        best = fewer or best
    return smoothed(moves, best, max_moves), at_least


def _transition(
    problem: TransitionProblem, moves: TransitionMoves, stage_of: StageOf, at_least: int, proven: bool
) -> Transition:
    count = max(stage_of, default=-1) + 1
    remove: list[list[PortPair]] = [[] for _ in range(count)]
    add: list[list[PortPair]] = [[] for _ in range(count)]
    for stage, removal in zip(stage_of, moves.removals, strict=False):
        remove[stage].append(removal)
    for stage, addition in zip(stage_of[len(moves.removals) :], moves.additions, strict=True):
        add[stage].append(addition)
    stages = tuple(TransitionStage(tuple(down), tuple(up)) for down, up in zip(remove, add, strict=True))
    suffer = _suffer(problem, stages)
    dark = tuple(sorted(subject for subject in suffer if isinstance(subject, tuple)))
    thin = tuple(sorted(subject for subject in suffer if isinstance(subject, str)))
    return Transition(stages, dark, thin, at_least, proven)


def circuits_up(problem: TransitionProblem, planned: Transition) -> tuple[CircuitsUp, ...]:
    """Return the number of circuits of each pair and endpoint at each point of the transition."""
    known = {*circuits(problem.cabling, problem.current), *circuits(problem.cabling, problem.target)}
    pairs = sorted(subject for subject in known if isinstance(subject, tuple))
    endpoints = sorted(subject for subject in known if isinstance(subject, str))
    return tuple(
        CircuitsUp(stage, kind, {pair: up[pair] for pair in pairs}, {endpoint: up[endpoint] for endpoint in endpoints})
        for stage, kind, up, _ in _counted(problem, planned.stages)
    )


def _counted(
    problem: TransitionProblem, stages: tuple[TransitionStage, ...]
) -> Iterator[tuple[int, PointKind, Counter[Subject], Iterable[Subject]]]:
    """Yield, for each point of the transition, its stage, its kind, the circuit counts, and the pairs and endpoints
    that have lost circuits since the previous point. The circuit counts are one object that is updated in place."""
    up = Counter(circuits(problem.cabling, problem.current))
    yield 0, "start", up, ()
    for number, stage in enumerate(stages, start=1):
        lost = [subject for each in stage.remove for subject in subjects(problem.cabling, each)]
        up.subtract(lost)
        yield number, "removed", up, lost
        up.update(subject for each in stage.add for subject in subjects(problem.cabling, each))
        yield number, "added", up, ()


def _suffer(problem: TransitionProblem, stages: tuple[TransitionStage, ...]) -> set[Subject]:
    """Return the pairs and endpoints that fall below their minimum at some point."""
    fewest = lit_floors(problem.cabling, problem.current, problem.target, problem.min_fraction)
    points = _counted(problem, stages)
    return {subject for *_, up, lost in points for subject in lost if up[subject] < fewest.get(subject, 0)}
